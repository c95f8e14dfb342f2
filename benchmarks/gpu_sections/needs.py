"""What must be installed for the engine and the sections, and how to get it onto a machine without a network.

Owns: the list, the wording.  Imports nothing that may be missing.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
# By the names that are imported, which are those on PyPI as well.
NEEDED = (*("jinja2", "msgspec", "numpy", "pluggy", "rich"), *("safetensors", "tokenizers", "torch", "tqdm", "uvloop"))
# Without these some rows are skipped.  The name that is imported -> the one on PyPI.
USEFUL = {
    "llguidance": "llguidance",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
    "flash_attn": "flash-attn",
}


def complaint() -> str:
    """What is missing and what to do about it; empty if nothing is."""
    if not installed("engine"):
        return f"Python does not find callboard; start it with PYTHONPATH={ROOT}"
    missing = [name for name in NEEDED if not installed(name)]
    if not missing:
        return ""
    names = " ".join(missing)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{sys.executable} lacks {', '.join(missing)}; pip install {names}\n"
        "Where nothing can be fetched, carry them: on another machine\n"
        f"    pip download --no-deps --only-binary=:all: --python-version {version} "
        f"--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest wheels {names}\n"
        "and on this one\n"
        "    pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site:$PYTHONPATH"
    )


def remark() -> str:
    """What else would be of use; empty if nothing would."""
    absent = [f"{name} (pip install {package})" for name, package in USEFUL.items() if not installed(name)]
    return f"rows that need one of these are skipped: {', '.join(absent)}" if absent else ""


def installed(name: str) -> bool:
    """Whether it could be imported; it is not."""
    return find_spec(name) is not None
