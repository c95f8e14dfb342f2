"""examples/plugin_template: built, installed into an environment of its own, tested there, and served through."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.pace import far

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template"
TIMEOUT_S = 120


def run(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "COLUMNS": "200", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=far(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the template's wheel, and all that this one has.  No network."""
    root = tmp_path_factory.mktemp("template")
    project = shutil.copytree(TEMPLATE, root / "project", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    offline = ("--no-index", "--no-deps", "--quiet")
    run(Path(sys.executable), "-m", "pip", "wheel", ".", "--no-build-isolation", *offline, "-w", str(root), cwd=project)
    (wheel,) = root.glob("*.whl")
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    (packages,) = (root / "env" / "lib").glob("python*/site-packages")
    # Not a plain path: the .pth files of editable installs in that folder are to count as well.
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    run(Path(sys.executable), "-m", "pip", "--python", str(python), "install", str(wheel), *offline, cwd=root)
    return python


@pytest.mark.slow
def test_it_is_installed_tested_listed_and_served_through(environment: Path, tmp_path: Path) -> None:
    shutil.copytree(TEMPLATE / "tests", tmp_path / "tests")
    assert "9 passed" in run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    listed = run(environment, "-m", "callboard", "plugins", "--set", "plugins.attention=watched", cwd=tmp_path)
    (line,) = [line for line in listed.splitlines() if "attention.watched" in line]
    assert "callboard-template 0.1.0" in line
    assert line.startswith("* "), "chosen"
    assert "cannot run here" not in line
    said = run(
        environment,
        *("-m", "callboard", "generate", "def add(a, b):", "--max-tokens", "8", "--temperature", "0"),
        *("--log-level", "info", "--set", "plugins.eviction=aged_lfu", "--set", "plugins.attention=watched"),
        *("--set", 'plugins.options={"attention.watched"={every=10}}', "--set", "device.kind=cpu"),
        cwd=tmp_path,
    )
    assert "plugin attention.watched (callboard-template 0.1.0): right on a trial" in said
    assert "callboard_template.watched: call 10, layer" in said
    assert "def add(a, b):\n" in said
