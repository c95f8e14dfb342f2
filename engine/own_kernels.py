"""Whose kernels compute here, as far as that is known before torch is there: callboard's own, or torch's.

Owns: the environment variable that decides, where the C compiler is.  Does not know: kernels, devices.
"""

import os
import shutil

VARIABLE = "CALLBOARD_KERNELS"


def c_compiler() -> str | None:
    """The compiler of the kernels in C; None where there is none, or the environment says what else computes."""
    return None if os.environ.get(VARIABLE) else shutil.which(os.environ.get("CC") or "cc")


def kernels_here() -> str:
    """'torch' or 'triton' where the environment says so; else 'own', or 'torch' without a compiler."""
    return os.environ.get(VARIABLE) or ("own" if c_compiler() else "torch")
