"""The library of the C sources of this folder for this kind of CPU: from the wheel, or compiled once.

Owns: the choice, the cached file.  Does not know: what the functions compute.
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
from itertools import product
from pathlib import Path

import torch

from engine.host.cache_folder import cache_folder, replace_file, writable_folder
from engine.kernels import sources
from engine.kernels.levels import Level, levels_here
from engine.settings.own_kernels import BUILT, VARIABLE, c_compiler

log = logging.getLogger(__name__)

# A compiler without OpenMP, or with another one than torch, makes functions of one thread.
THREADS = (sources.OPENMP, ())


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the library: the wheel's for this CPU, or compiled at the first start; None, so that torch computes, if
    there is neither.

    Also None if the environment variable CALLBOARD_KERNELS is torch or triton."""
    if os.environ.get(VARIABLE):
        return None
    levels = levels_here(torch.backends.cpu.get_cpu_capability())
    if (library := _built(levels)) is not None:
        return library
    compiler = c_compiler()
    if not compiler:
        if given := os.environ.get("CC"):
            log.warning("kernels: torch (CC=%r names no program here; correct it, or unset it to use cc)", given)
        else:
            log.info("kernels: torch (there is no C compiler; with one a small model's steps are shorter)")
        return None
    names = ", ".join(sources.SOURCES)
    try:
        library = _library(compiler, levels)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels: torch (%s cannot compile %s: %s)", shlex.join(compiler), names, error)
        return None
    log.info("kernels: %s, compiled by %s", names, shlex.join(compiler))
    return library


def _built(levels: list[Level]) -> ctypes.CDLL | None:
    """Return the wheel's library of the best level that it has; None if it has none that can be loaded here."""
    for level in levels:
        path = BUILT / f"{level.name}.so"
        if path.is_file():
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:  # this torch has another OpenMP, or this system another C library
                log.warning("kernels: %s cannot be loaded here: %s", path, error)
                continue
            log.info("kernels: for %s, of the wheel", level.name)
            return library
    return None


def _library(compiler: list[str], levels: list[Level]) -> ctypes.CDLL:
    """Return the compiled sources, from an earlier start if possible.  Raises OSError, SubprocessError."""
    ways = (sources.FLAGS, THREADS, *sources.SOURCES.values(), [level.flags for level in levels])
    what = (sources.texts(), compiler, *ways, platform.machine(), platform.system())
    folder, kind = writable_folder("kernels"), _digest(repr(what).encode())
    for place in {cache_folder("kernels"), folder}:  # a folder that cannot be written may have it as well
        if place is not None and (library := _kept(place, kind)) is not None:
            return library
    log.info("kernels: compiling %s, once on this machine", ", ".join(sources.SOURCES))
    for level, threads in product(levels, THREADS):
        try:
            return _loaded(sources.made(compiler, (*level.flags, *threads)), folder, kind)
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
            log.info("kernels: compiled at each start, as %s cannot be kept: %s", kept, error)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(made)
        file.flush()
        return ctypes.CDLL(file.name)  # it stays loaded without the file


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
