"""Kinds of CPUs as which another CPU can act, with some of their instructions in plain C.

Owns: what replaces an instruction.  Does not know: the compiler, what is called.
"""

from dataclasses import replace
from pathlib import Path

from engine.kernels.levels import AVX2, V3, Level

HEADER = Path(__file__).parent / "emulated.h"


def emulated(level: Level) -> Level | None:
    """The level for a CPU that lacks its newest instructions; None if nothing takes their place."""
    flags = {"avx_vnni": (*V3, "-DEMULATE_AVXVNNI")}.get(level.name)
    return flags and replace(level, flags=(*flags, "-include", str(HEADER)), needs=AVX2)
