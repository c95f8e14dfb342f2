"""The machine that a result was measured on, as its file names it.

Owns: commit, command, processor, versions.  Does not know: what was measured.
"""

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine import __version__


def describe_machine() -> dict[str, Any]:
    """Commit, command, processor, threads, load of the last minutes, versions."""
    torch = sys.modules.get("torch")  # a benchmark that runs without it does not wait for its import
    return {
        "version": __version__,
        "commit": _commit(),
        "command": " ".join(["python", *_script(), *sys.argv[1:]]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _commit() -> str:
    """Returns the commit of the repository that this file is in; '' where it is in none."""
    git = shutil.which("git")
    if git is None:
        return ""
    where = Path(__file__).parent
    asked = [git, "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=where, capture_output=True, text=True, check=False).stdout.strip()


def _script() -> list[str]:
    """Returns the command as one would type it: a module that was run by its name has been given its place on this
    machine."""
    path = Path(sys.argv[0])
    return ["-m", path.parent.name] if path.name == "__main__.py" else [sys.argv[0]]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
        flags = facts.get("flags\t\t", "")
        extension = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX"
        name = facts.get("model name\t", "unknown").strip()
        return f"{name} ({extension})"
    except OSError:
        return platform.processor()
