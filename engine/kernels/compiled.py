"""The C sources of this folder, compiled once for this kind of CPU.

Owns: the compiler, its flags, the cached file.  Does not know: what the functions compute.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from engine.host.cache_folder import cache_folder, replace_file
from engine.kernels.levels import levels_here
from engine.settings.own_kernels import VARIABLE, c_compiler

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# Without -ffinite-math: NaN and infinity must survive, so that a failed row is noticed.
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
# Sums in cpu.c may be reordered.  The other sources fix the order of their sums, draw.c to the bit.  The tiles of
# products.c and blocks.c spell out what -O3 would find, in a third of its time.
SOURCES = {
    "cpu.c": ("-fassociative-math",),
    "attention.c": (),
    "products.c": ("-O2",),
    "blocks.c": ("-O2",),
    "decodes.c": (),
    "draw.c": ("-ffp-contract=off",),
}
HEADERS = ("cpu.h", "vectors.h")
COMPILE_S = 180.0
# Threads come from torch's OpenMP, which every library of the process finds, so it is not linked again.  A compiler
# without OpenMP, or with another one than torch, makes functions of one thread.
THREADS = (("-fopenmp",), ())


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the library, compiled at the first start on this CPU; None, so that torch computes, if that fails.

    Also None if the environment variable CALLBOARD_KERNELS is torch or triton."""
    compiler = c_compiler()
    if not compiler:
        if os.environ.get(VARIABLE):
            return None
        if given := os.environ.get("CC"):
            log.warning("kernels: torch (CC=%r names no program here; correct it, or unset it to use cc)", given)
        else:
            log.info("kernels: torch (there is no C compiler; with one a small model's steps are shorter)")
        return None
    try:
        library = _library(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels: torch (%s cannot compile %s: %s)", shlex.join(compiler), ", ".join(SOURCES), error)
        return None
    log.info("kernels: %s, compiled by %s", ", ".join(SOURCES), shlex.join(compiler))
    return library


def _library(compiler: list[str]) -> ctypes.CDLL:
    """Return the compiled sources, from the user's cache if possible.  Raises OSError, SubprocessError."""
    levels = levels_here(torch.backends.cpu.get_cpu_capability())
    texts = [(FOLDER / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    what = (texts, compiler, FLAGS, THREADS, *SOURCES.values(), levels, platform.machine(), platform.system())
    folder, kind = cache_folder("kernels"), _digest(repr(what).encode())
    if folder is not None and (library := _kept(folder, kind)) is not None:
        return library
    log.info("kernels: compiling %s, once on this machine", ", ".join(SOURCES))
    for level, threads in product(levels, THREADS):
        try:
            return _loaded(_made(compiler, (*FLAGS, *level.flags, *threads)), folder, kind)
        except (OSError, subprocess.CalledProcessError) as error:
            if (level, threads) == (levels[-1], THREADS[-1]):
                raise
            given = shlex.join((*level.flags, *threads))
            log.info("kernels: %s cannot compile them with %s: %s", shlex.join(compiler), given, error)
    raise AssertionError("the last way returns or raises")


def _kept(folder: Path, kind: str) -> ctypes.CDLL | None:
    """Return the library of this kind that an earlier start cached; None if there is none.  The file name contains its
    digest, since damaged code may end the process when it is loaded, or during any request."""
    for path in sorted(folder.glob(f"{kind}-*.so")):
        try:
            if path.name == f"{kind}-{_digest(path.read_bytes())}.so":
                return ctypes.CDLL(str(path))
            log.warning("kernels: %s is damaged; it is removed, and compiled again", path)
            path.unlink(missing_ok=True)
        except OSError as error:  # it is from a machine with other libraries that shares the folder
            log.info("kernels: %s cannot be loaded here: %s", path, error)
    return None


def _loaded(made: bytes, folder: Path | None, kind: str) -> ctypes.CDLL:
    """Load a library that was just compiled, and cache it if possible.  Raises OSError."""
    if folder is not None:
        kept = folder / f"{kind}-{_digest(made)}.so"
        try:
            replace_file(kept, made)
            return ctypes.CDLL(str(kept))  # a folder for temporary files may forbid running code
        except OSError as error:
            log.info("%s are compiled at each start: %s", ", ".join(SOURCES), error)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(made)
        file.flush()
        return ctypes.CDLL(file.name)  # it stays loaded without the file


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _made(compiler: Sequence[str], flags: Sequence[str]) -> bytes:
    """Compile the sources and return the library's bytes.  Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made_in:
        made = Path(made_in) / "kernels.so"
        objects = [f"{made_in}/{name}.o" for name in SOURCES]
        with ThreadPoolExecutor() as compilers:
            running = [
                compilers.submit(_run, *compiler, *flags, *own, "-c", str(FOLDER / name), "-o", made_of)
                for (name, own), made_of in zip(SOURCES.items(), objects, strict=True)
            ]
            for one in running:
                one.result()
        _run(*compiler, "-shared", *objects, "-o", str(made), "-lm")
        return made.read_bytes()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
