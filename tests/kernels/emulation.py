"""Kinds of CPUs as which another CPU can act, with some of their instructions in plain C.

Owns: what replaces an instruction.  Does not know: the compiler, what is called.
"""

from dataclasses import replace
from pathlib import Path

from engine.kernels.levels import AVX2, AVX512, V3, V4, VNNI, Level

HEADER = Path(__file__).parent / "emulated.h"


# Level -> the flags for a CPU that lacks its newest instructions, and what that CPU needs.
INSTEAD = {
    "avx_vnni": ((*V3, "-DEMULATE_AVXVNNI"), AVX2),
    "avx512_bf16": ((*V4, "-DEMULATE_AVX512BF16"), AVX512),
    "amx_int8": ((*V4, VNNI, "-DEMULATE_AMX"), AVX512 | {"avx512_vnni"}),
}


def emulated(level: Level) -> Level | None:
    """The level for a CPU that lacks its newest instructions; None if nothing takes their place."""
    if level.name not in INSTEAD:
        return None
    flags, needs = INSTEAD[level.name]
    return replace(level, flags=(*flags, "-include", str(HEADER)), needs=needs)
