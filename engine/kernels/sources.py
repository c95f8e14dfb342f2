"""The C sources of this folder, and how a compiler makes a library of them.

Owns: the files, the flags.  Does not know: torch, where a library is kept.  ``hatch_build.py`` calls it too.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
# Without -ffinite-math: NaN and infinity must survive, so that a failed row is noticed.
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
# Sums in cpu.c may be reordered.  The other sources fix the order of their sums, draw.c to the bit.  The tiles of
# products.c and blocks.c spell out what -O3 would find, in a third of its time.
SOURCES = {
    "team.c": (),
    "cpu.c": ("-fassociative-math",),
    "attention.c": (),
    "products.c": ("-O2",),
    "blocks.c": ("-O2",),
    "recurrent.c": (),
    "decodes.c": (),
    "draw.c": ("-ffp-contract=off",),
}
UNITS = {"blocks.c": 4}  # which several compilers can make at once, each with its number as UNIT
HEADERS = ("cpu.h", "lanes.h", "vectors.h", "tiles.h")
# Threads come from torch's OpenMP, which every library of the process finds, so it is not linked again.
OPENMP = ("-fopenmp",)
COMPILE_S = 180.0


def texts() -> list[bytes]:
    """Return the contents of the sources and headers."""
    return [(FOLDER / name).read_bytes() for name in (*SOURCES, *HEADERS)]


def made(compiler: Sequence[str], flags: Sequence[str], limit_s: float | None = COMPILE_S) -> bytes:
    """Compile the sources and return the library's bytes.  limit_s: for one source.

    Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "kernels.so"
        objects: dict[str, tuple[str, ...]] = {}  # made of which source, with its flags
        for name, own in SOURCES.items():
            for unit in range(UNITS.get(name, 1)):
                numbered = (f"-DUNIT={unit}",) if name in UNITS else ()
                objects[f"{folder}/{name}.{unit}.o"] = (*own, *numbered, "-c", str(FOLDER / name))
        with ThreadPoolExecutor() as compilers:
            running = [
                compilers.submit(_run, limit_s, *compiler, *FLAGS, *flags, *of, "-o", made_of)
                for made_of, of in objects.items()
            ]
            for one in running:
                one.result()
        _run(limit_s, *compiler, "-shared", "-s", *objects, "-o", str(library), "-lm")
        return library.read_bytes()


def _run(limit_s: float | None, *command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=limit_s)
