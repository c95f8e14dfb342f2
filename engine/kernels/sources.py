"""The C sources of this folder, and how a compiler makes a library of them.

Owns: the files, the flags.  Does not know: torch, where a library is kept.  ``hatch_build.py`` calls it too.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
Unit = tuple[str, int]  # a source, and a part of it that compilers make alone
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
# Sources that few models need: each is in a library of its own, with UNIT 1 of team.c for its loops.
LATER = ("blocks.c", "recurrent.c")
# The tables of tiles, of which a weight needs those of its kind: UNIT 1 and above of a source, in this order.
TILES = {
    "products.c": ("half_tiles", "upper_tiles", "pair_tiles", "byte_tiles"),
    "blocks.c": (
        *("plain4", "minimum4", "plain5", "minimum5", "plain8", "super_minimum4", "super_minimum5", "super6"),
        *("coded4", "zero4", "zero_upper4"),
    ),
}
# The tables of weights that are stored so: as other floats, rounded, or in blocks by ggml's names.
TABLES = {
    **{"float16": "half_tiles", "bfloat16": "upper_tiles", "int8": "byte_tiles"},
    **{"Q4_0": "plain4", "Q4_1": "minimum4", "Q5_0": "plain5", "Q5_1": "minimum5", "Q8_0": "plain8"},
    **{"Q4_K": "super_minimum4", "Q5_K": "super_minimum5", "Q6_K": "super6", "MXFP4": "coded4"},
    **dict.fromkeys(("HALF32", "HALF64", "HALF128"), "zero4"),
    **dict.fromkeys(("UPPER32", "UPPER64", "UPPER128"), "zero_upper4"),
}
HEADERS = ("cpu.h", "lanes.h", "vectors.h", "tiles.h")
# Threads come from torch's OpenMP, which every library of the process finds, so it is not linked again.
OPENMP = ("-fopenmp",)
COMPILE_S = 180.0


def texts() -> list[bytes]:
    """Return the contents of the sources and headers."""
    return [(FOLDER / name).read_bytes() for name in (*SOURCES, *HEADERS)]


def tables_of(stored: Iterable[str]) -> tuple[str, ...]:
    """Return the tables for weights that are stored in these ways, each once, in the order of their units."""
    wanted = {TABLES[one] for one in stored if one in TABLES}
    return tuple(table for of in TILES.values() for table in of if table in wanted)


def parts_of(stored: Iterable[str], *, recurrent: bool) -> list[tuple[str, ...]]:
    """Return what a model needs beside the first library: the parts of each library that is asked for when it loads.

    stored: how its weights are stored.  recurrent: whether it has recurrent layers."""
    tables, names = tables_of(stored), {*stored}
    in_blocks = {*tables} & {*TILES["blocks.c"]} or "int4" in names
    wanted = {tables: tables, ("blocks.c",): in_blocks, ("recurrent.c",): recurrent}
    return [parts for parts, needed in wanted.items() if needed]


def units(parts: Sequence[str] = ()) -> list[Unit]:
    """Return the units of these tables of tiles and sources of LATER; without any, those of all that is neither."""
    of_part: dict[str, list[Unit]] = {name: [("team.c", 1), (name, 0)] for name in LATER}
    of_part |= {table: [(name, n)] for name, of in TILES.items() for n, table in enumerate(of, 1)}
    return [unit for part in parts for unit in of_part[part]] or [(name, 0) for name in SOURCES if name not in LATER]


def every_unit() -> list[Unit]:
    """Return the units of a library that has everything."""
    return [*((name, 0) for name in SOURCES), *units([table for of in TILES.values() for table in of])]


def made(
    compiler: Sequence[str], flags: Sequence[str], what: Sequence[Unit], limit_s: float | None = COMPILE_S
) -> bytes:
    """Compile units of the sources and return the library's bytes.  limit_s: for one unit.

    Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "kernels.so"
        objects = {f"{folder}/{name}.{number}.o": (name, number) for name, number in what}
        with ThreadPoolExecutor() as compilers:
            running = [
                compilers.submit(_run, limit_s, *compiler, *FLAGS, *flags, *_of(unit), "-o", made_of)
                for made_of, unit in objects.items()
            ]
            for one in running:
                one.result()
        _run(limit_s, *compiler, "-shared", "-s", *objects, "-o", str(library), "-lm")
        return library.read_bytes()


def _of(unit: Unit) -> list[str]:
    name, number = unit
    return [*SOURCES[name], f"-DUNIT={number}", "-c", str(FOLDER / name)]


def _run(limit_s: float | None, *command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=limit_s)
