"""Whose kernels compute here, as far as that is known before torch is there: callboard's own, or torch's.

Owns: the environment variable that decides, where the C compiler is.  Does not know: kernels, devices.
"""

import os
import shlex
import shutil

VARIABLE = "CALLBOARD_KERNELS"


def c_compiler() -> list[str]:
    """The command of the compiler of the kernels in C; empty without one, or if the environment says what computes.

    CC may hold arguments, or a command before the compiler, as for make: "gcc -m64", "ccache gcc"."""
    if os.environ.get(VARIABLE):
        return []
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError:  # a quotation mark without its other one
        return []
    program = shutil.which(command[0])
    return [] if program is None else [program, *command[1:]]


def kernels_here() -> str:
    """'torch' or 'triton' where the environment says so; else 'own', or 'torch' without a compiler."""
    return os.environ.get(VARIABLE) or ("own" if c_compiler() else "torch")
