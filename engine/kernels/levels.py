"""The kinds of CPUs that the C sources of this folder are compiled for.

Owns: the compiler's flags for each kind, what a CPU needs to run it.  Does not know: the compiler, torch.
"""

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from engine.host.cpuinfo import cpu_entry


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPU.  machine: as ``platform.machine`` has it; '' for any.  flags: of the compiler.

    needs: entries in the list of a CPU's features in /proc/cpuinfo.
    capability: what torch must say that this CPU has, or an entry that comes later in CAPABILITIES."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    capability: str = "DEFAULT"


CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
ANY = Level("any", "", (), frozenset())
V3, V4 = ("-march=x86-64-v3",), ("-march=x86-64-v4", "-mprefer-vector-width=512")
VNNI = "-mavx512vnni"
BF16 = (*V4, VNNI, "-mavx512bf16")
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
DOTPROD = frozenset({"asimddp"})
AMX = AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"}
# Of one machine, a later one needs all that an earlier one needs, but for AVX-VNNI: it is for CPUs without AVX-512.
LEVELS = (
    ANY,
    Level("avx2", "x86_64", V3, AVX2, "AVX2"),
    Level("avx_vnni", "x86_64", (*V3, "-mavxvnni"), AVX2 | {"avx_vnni"}, "AVX2"),
    Level("avx512", "x86_64", V4, AVX512, "AVX512"),
    Level("avx512_vnni", "x86_64", (*V4, VNNI), AVX512 | {"avx512_vnni"}, "AVX512"),
    Level("avx512_bf16", "x86_64", BF16, AVX512 | {"avx512_vnni", "avx512_bf16"}, "AVX512"),
    Level("amx_int8", "x86_64", (*BF16, "-mamx-tile", "-mamx-int8"), AMX, "AVX512"),
    Level("neon_dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), DOTPROD),
    Level("neon_i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm+bf16",), DOTPROD | {"i8mm", "bf16"}),
)


def levels_of(machine: str, features: Iterable[str], capability: str) -> list[Level]:
    """Return the levels that a CPU can run, the best one first.  capability: torch's word for it; what is not in
    CAPABILITIES is the last one's equal or of another machine, and forbids nothing."""
    has, most = set(features), CAPABILITIES.index(capability) if capability in CAPABILITIES else len(CAPABILITIES)
    fitting = (one for one in LEVELS if one.machine in ("", machine) and one.needs <= has)
    return [one for one in fitting if CAPABILITIES.index(one.capability) <= most][::-1]


def levels_here(capability: str) -> list[Level]:
    """Return the levels that this CPU can run, the best one first."""
    return levels_of(platform.machine(), cpu_entry("flags", "Features").split(), capability)
