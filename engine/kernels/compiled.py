"""The C sources of this folder, compiled once for this kind of CPU.

Owns: the compiler, its flags, the file that is kept.  Does not know: what the functions compute.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.cache_folder import cache_folder, replace_file
from engine.own_kernels import VARIABLE, c_compiler

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# NaN and infinity stay what they are: a row that fails must be seen to.
FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
# Sums of the first may be taken in another order; those of the others say in which they are taken, and of the last to
# the bit.  Tiles of products say all that -O3 would find, and it takes three times as long.
SOURCES = {
    "cpu.c": ("-fassociative-math",),
    "attention.c": (),
    "products.c": ("-O2",),
    "decodes.c": (),
    "draw.c": ("-ffp-contract=off",),
}
HEADER = "cpu.h"
LEVELS = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
COMPILE_S = 180.0
# Threads are those of torch, whose OpenMP every library of the process finds; so it is not linked again.  A compiler
# that has none, or another one than torch, makes functions that take one thread.
THREADS = (("-fopenmp",), ())


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """All functions, compiled at the first start on this CPU; None, and torch does the work, if that fails.

    None as well where the environment variable CALLBOARD_KERNELS is torch or triton."""
    compiler = c_compiler()
    if compiler is None:
        if not os.environ.get(VARIABLE):
            log.info("kernels: torch (there is no C compiler; with one a small model's steps are shorter)")
        return None
    try:
        library = _library(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels: torch (%s cannot compile %s: %s)", compiler, ", ".join(SOURCES), error)
        return None
    log.info("kernels: %s, compiled by %s", ", ".join(SOURCES), compiler)
    return library


def _library(compiler: str) -> ctypes.CDLL:
    """The compiled sources, from the user's cache if they are there.  Raises OSError, SubprocessError."""
    level = LEVELS.get(torch.backends.cpu.get_cpu_capability(), ())
    if level == LEVELS["AVX512"] and torch.cpu._is_vnni_supported():
        level = (*level, "-mavx512vnni")
    texts = [(FOLDER / name).read_bytes() for name in (*SOURCES, HEADER)]
    what = (texts, compiler, FLAGS, THREADS, *SOURCES.values(), level, platform.machine(), platform.system())
    folder = cache_folder("kernels")
    kept = None if folder is None else folder / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.so"
    if kept is not None and kept.exists():
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:  # of a machine with other libraries that shares the folder
            log.info("%s are compiled again: %s", ", ".join(SOURCES), error)
    log.info("kernels: compiling %s, once on this machine", ", ".join(SOURCES))
    for threads in THREADS:
        try:
            return _made((compiler, *FLAGS, *level, *threads), kept)
        except (OSError, subprocess.CalledProcessError) as error:
            if not threads:
                raise
            log.info("%s have one thread: %s", ", ".join(SOURCES), error)
    raise AssertionError("the last way returns or raises")


def _made(command: Sequence[str], kept: Path | None) -> ctypes.CDLL:
    """Compile, keep and load the sources.  Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made_in:
        made = Path(made_in) / "kernels.so"
        objects = [f"{made_in}/{name}.o" for name in SOURCES]
        with ThreadPoolExecutor() as compilers:
            running = [
                compilers.submit(_run, *command, *flags, "-c", str(FOLDER / name), "-o", made_of)
                for (name, flags), made_of in zip(SOURCES.items(), objects, strict=True)
            ]
            for one in running:
                one.result()
        _run(command[0], "-shared", *objects, "-o", str(made), "-lm")
        if kept is not None:
            try:
                replace_file(kept, made.read_bytes())
                return ctypes.CDLL(str(kept))  # code may run there and not among temporary files
            except OSError as error:
                log.info("%s are compiled at each start: %s", ", ".join(SOURCES), error)
        return ctypes.CDLL(str(made))  # stays when the file is gone


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
