"""The kernels in C for kinds of CPUs that this machine is not: by instructions in plain C, or by qemu for ARM."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.levels import LEVELS, Level, levels_here
from engine.kernels.sources import FLAGS, FOLDER
from engine.settings.own_kernels import c_compiler
from tests.kernels.emulation import emulated

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).parent / "driver.c"
CALLED = ("team.c", "products.c", "blocks.c", "attention.c", "recurrent.c")
CROSS_COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# A model that qemu acts as -> with what it has beyond the first 64-bit ARM.
MODELS = {"neon_dotprod": "neoverse-n1", "neon_i8mm": "max"}
NATIVE = next(one for one in LEVELS if one.name == "avx2")


def printed(compiler: list[str], level: Level, folder: Path, runs: list[str]) -> str:
    """The output of the driver when it is compiled for the level.  -O1 takes half of the time that -O2 does."""
    made = folder / level.name
    sources = [DRIVER, *(FOLDER / name for name in CALLED)]
    flags = [*FLAGS, *level.flags, "-O1", "-I", FOLDER, "-static"]
    subprocess.run([*compiler, *flags, *sources, "-o", made, "-lm"], check=True)
    done = subprocess.run([*runs, made], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the driver on this machine."""
    if not c_compiler() or platform.machine() != "x86_64" or NATIVE not in levels_here(""):
        pytest.skip("there is no C compiler for an x86-64 with AVX2")
    return printed(c_compiler(), NATIVE, tmp_path_factory.mktemp("driver"), [])


@pytest.mark.parametrize("level", [one for one in map(emulated, LEVELS) if one], ids=lambda level: level.name)
def test_products_by_instructions_that_a_cpu_lacks(level: Level, expected: str, tmp_path) -> None:
    if not levels_here("")[0].needs >= level.needs:
        pytest.skip("this CPU lacks more than is in plain C")
    assert printed(c_compiler(), level, tmp_path, []) == expected


@pytest.mark.parametrize("level", [one for one in LEVELS if one.machine == "aarch64"], ids=lambda level: level.name)
def test_products_on_arm_have_the_rows_of_x86_and_the_values_of_float64(level: Level, expected: str, tmp_path) -> None:
    missing = [one for one in (CROSS_COMPILER, QEMU) if not shutil.which(one)]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: apt-get install gcc-aarch64-linux-gnu qemu-user")
    assert printed([CROSS_COMPILER], level, tmp_path, [QEMU, "-cpu", MODELS[level.name]]) == expected
