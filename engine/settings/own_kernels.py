"""Whose kernels compute here, as far as is known before torch is imported: callboard's own, or torch's.

Owns: the environment variable that decides, the search for compilers, missing tools.  Does not know: kernels, devices.
"""

import os
import shlex
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "CALLBOARD_KERNELS"
# Of a wheel that was made for one kind of machine: a library for each kind of CPU.
BUILT = Path(__file__).parents[1] / "kernels" / "built"


def c_compiler() -> list[str]:
    """Return the command of the compiler for the kernels in C; empty without one, or if the variable is set.

    CC may hold arguments, or a command before the compiler, as make allows: "gcc -m64", "ccache gcc"."""
    if os.environ.get(VARIABLE):
        return []
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError:  # an unclosed quotation mark
        return []
    program = shutil.which(command[0])
    return [] if program is None else [program, *command[1:]]


def kernels_here() -> str:
    """Return 'torch' or 'triton' if the environment variable says so; else 'own', or 'torch' if the wheel has no
    libraries and there is no compiler."""
    return os.environ.get(VARIABLE) or ("own" if BUILT.is_dir() or c_compiler() else "torch")


def missing_for_triton() -> str:
    """Return what to install, and why, if triton cannot compile its kernels' launchers; '' if nothing is known to be
    missing."""
    if not find_spec("triton"):
        return "Run pip install 'callboard[cuda]', as triton is missing"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "Run apt-get install gcc python3-dev, as triton compiles its kernels' launchers and finds no C compiler"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"Run apt-get install python3-dev, as triton compiles its kernels' launchers and {header} is missing"
    return ""


def missing_for_flashinfer() -> str:
    """Return what to install, and why, if FlashInfer is installed and cannot build its kernels; else ''."""
    if not find_spec("flashinfer") or find_spec("flashinfer_jit_cache") or shutil.which("nvcc"):
        return ""
    return "Install flashinfer-jit-cache (https://flashinfer.ai/whl), as there is no nvcc that could build its kernels"
