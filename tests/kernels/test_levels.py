"""The kinds of CPUs that the kernels in C are compiled for, and which of them a CPU gets."""

import platform
import subprocess

import pytest

from engine.kernels.levels import LEVELS, levels_of
from engine.kernels.sources import FLAGS, FOLDER, SOURCES
from engine.settings.own_kernels import c_compiler

HASWELL = "abm avx avx2 bmi1 bmi2 f16c fma movbe"
SKYLAKE_X = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
CPUS = {
    "Core 2": ("ssse3", "DEFAULT", "any"),
    "Haswell": (HASWELL, "AVX2", "avx2"),
    "Alder Lake": (f"{HASWELL} avx_vnni", "AVX2", "avx_vnni"),
    "Skylake-X": (SKYLAKE_X, "AVX512", "avx512"),
    "Ice Lake": (f"{SKYLAKE_X} avx512_vnni", "AVX512", "avx512_vnni"),
    "Sapphire Rapids": (f"{SKYLAKE_X} avx512_vnni avx512_bf16 amx_tile amx_int8 avx_vnni", "AVX512", "amx_int8"),
    "Ice Lake, of which torch uses AVX2": (f"{SKYLAKE_X} avx512_vnni", "AVX2", "avx2"),
    "Ice Lake, of which torch uses nothing": (f"{SKYLAKE_X} avx512_vnni", "DEFAULT", "any"),
    "an unknown system": ("", "AVX512", "any"),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_gets_the_best_of_what_it_can_run(cpu: str) -> None:
    features, capability, best = CPUS[cpu]
    found = [one.name for one in levels_of("x86_64", features.split(), capability)]
    assert (found[0], found[-1]) == (best, "any")
    assert len(set(found)) == len(found)


def test_another_machine_gets_no_flags_of_x86() -> None:
    assert levels_of("riscv64", (), "DEFAULT") == [LEVELS[0]]


@pytest.mark.skipif(not c_compiler() or platform.machine() != "x86_64", reason="there is no C compiler for x86-64")
def test_products_for_avx_vnni_are_made_of_its_instructions_and_of_none_of_avx_512(tmp_path) -> None:
    (level,) = (one for one in LEVELS if one.name == "avx_vnni")
    command = [*c_compiler(), *FLAGS, *level.flags, *SOURCES["products.c"], "-S", "-o", "-", FOLDER / "products.c"]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "vpdpbusd" in made
    assert "vpmaddubsw" not in made
    assert "%zmm" not in made
    assert "{evex}" not in made
