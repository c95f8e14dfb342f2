"""New interpreters import what this one does, and not what lies in the working directory."""

import os
import subprocess
from pathlib import Path

from engine.host.interpreters import import_path, module_command


def test_a_folder_of_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    command = module_command("engine.host.own_files")
    environment = {**os.environ, **import_path()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
