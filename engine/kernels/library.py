"""The library of the C sources of this folder: compiled here once, or of a wheel, with the tiles that weights need.

Owns: the cached files, which compiler's flags work.  Does not know: torch, what the functions compute.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from threading import Thread

from engine.host.cache_folder import cache_folder, replace_file, writable_folder
from engine.kernels import sources
from engine.kernels.levels import Level, levels_here
from engine.settings.own_kernels import BUILT, c_compiler
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

# A compiler without OpenMP, or with another one than torch, makes functions of one thread.
THREADS = (sources.OPENMP, ())


class KernelLibrary(ctypes.CDLL):
    """A loaded library.  making: how this machine compiles further parts of it; None for a wheel's, which has them."""

    making: "Making | None" = None

    @cached_property
    def _later(self) -> dict[str, ctypes.CDLL]:
        """Libraries by source: where no file is kept, each is compiled once for a process."""
        return {}

    def tiles(self, tables: Sequence[str]) -> list[int]:
        """Return the addresses of these tables of ``sources.TILES``, compiled if no earlier start did.

        Raises PluginError."""
        of = self._with(tables)
        return [ctypes.addressof(ctypes.c_char.in_dll(of, table)) for table in tables]

    def functions_of(self, source: str) -> ctypes.CDLL:
        """Return the library of a source of ``sources.LATER``, compiled if no start did before.  Raises PluginError."""
        if source not in self._later:
            if (of := self._with([source])) is not self:
                of.give_loops(*(ctypes.cast(loop, ctypes.c_void_p) for loop in (self.share, self.worth)))
            self._later[source] = of
        return self._later[source]

    def _with(self, parts: Sequence[str]) -> "KernelLibrary":
        try:
            return self if self.making is None else self.making.library(parts)
        except (OSError, subprocess.SubprocessError) as error:
            raise PluginError(
                f"{', '.join(parts)} cannot be compiled, as other kernels could ({error}); repair the compiler, or set "
                "CALLBOARD_KERNELS=torch"
            ) from error


class Making:
    """A compiler with its ways to make a library, the best first: flags, and their name for cached files."""

    def __init__(self, compiler: Sequence[str], ways: Sequence[Sequence[str]]) -> None:
        self._compiler, self._ways = compiler, ways

    @classmethod
    def for_levels(cls, compiler: Sequence[str], levels: Iterable[Level]) -> "Making":
        """Return the ways for these levels, with threads and without."""
        return cls(compiler, [(*level.flags, *threads) for level, threads in product(levels, THREADS)])

    def library(self, parts: Sequence[str] = ()) -> KernelLibrary:
        """Return the library of these parts, or without any that of all else, from an earlier start if possible.

        Raises OSError, SubprocessError."""
        folder, kinds = writable_folder("kernels"), [self._kind(way, parts) for way in self._ways]
        places = [one for one in {cache_folder("kernels"), folder} if one is not None]
        for way, kind in zip(self._ways, kinds, strict=True):
            for place in places:  # a folder that cannot be written may have it as well
                if (library := _kept(place, kind)) is not None:
                    return self._with_way(library, way)
        names = ", ".join(parts or (name for name, _ in sources.units()))
        log.info("kernels: compiling %s, once on this machine", names)
        for way, kind in zip(self._ways, kinds, strict=True):
            try:
                content = sources.made(self._compiler, way, sources.units(parts))
                return self._with_way(_loaded(content, folder, kind), way)
            except (OSError, subprocess.CalledProcessError) as error:
                if way is self._ways[-1]:
                    raise
                log.info(
                    "kernels: %s cannot compile them with %s: %s", shlex.join(self._compiler), shlex.join(way), error
                )
        raise AssertionError("the last way returns or raises")

    def keep(self, parts: Sequence[str] = ()) -> None:
        """Compile the best way what ``library`` will find, unless an earlier start kept one of any way: the best may be
        one that does not work here.  It is not loaded, which needs torch's OpenMP.

        Raises OSError, SubprocessError."""
        folder, kinds = writable_folder("kernels"), [self._kind(way, parts) for way in self._ways]
        places = [one for one in {cache_folder("kernels"), folder} if one is not None]
        if folder is None or any(any(place.glob(f"{kind}-*.so")) for place in places for kind in kinds):
            return
        _keep(sources.made(self._compiler, self._ways[0], sources.units(parts)), folder, kinds[0])

    def _with_way(self, library: KernelLibrary, way: Sequence[str]) -> KernelLibrary:
        library.making = Making(self._compiler, [way])
        return library

    def _kind(self, way: Sequence[str], parts: Sequence[str]) -> str:
        given = (sources.FLAGS, sources.SOURCES, tuple(way), tuple(parts), self._compiler)
        return _digest(repr((sources.texts(), given, platform.machine(), platform.system())).encode())


@contextmanager
def compiling(stored: Sequence[str], *, recurrent: bool, for_cpu: bool) -> Iterator[None]:
    """Compile what a model on a CPU needs while the body runs, if no earlier start did.  Problems are left to the later
    caller.

    stored: how its weights are stored, of ``sources.TABLES`` or other ways.  recurrent: whether it has such layers."""
    compiler = c_compiler() if for_cpu and not BUILT.is_dir() else []
    parts = [(), *sources.parts_of(stored, recurrent=recurrent)] if compiler else []
    threads = [Thread(target=_compile, args=(compiler, part), daemon=True) for part in parts]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        for one in threads:
            one.join()


def _compile(compiler: list[str], parts: Sequence[str]) -> None:
    with suppress(OSError, subprocess.SubprocessError):
        making = Making.for_levels(compiler, levels_here(os.environ.get("ATEN_CPU_CAPABILITY", "").upper()))
        making.keep(parts)


def _kept(folder: Path, kind: str) -> KernelLibrary | None:
    """Return the library of this kind that an earlier start cached; None if there is none.  The file name contains its
    digest, since damaged code may end the process when it is loaded, or during any request."""
    for path in sorted(folder.glob(f"{kind}-*.so")):
        try:
            if path.name == f"{kind}-{_digest(path.read_bytes())}.so":
                return KernelLibrary(str(path))
            log.warning("kernels: %s is damaged; it is removed, and compiled again", path)
            path.unlink(missing_ok=True)
        except OSError as error:  # it is from a machine with other libraries that shares the folder
            log.info("kernels: %s cannot be loaded here: %s", path, error)
    return None


def _keep(content: bytes, folder: Path, kind: str) -> Path:
    kept = folder / f"{kind}-{_digest(content)}.so"
    replace_file(kept, content)
    return kept


def _loaded(content: bytes, folder: Path | None, kind: str) -> KernelLibrary:
    """Load a library that was just compiled, and cache it if possible.  Raises OSError."""
    if folder is not None:
        try:  # before a folder for temporary files, which may forbid running code
            return KernelLibrary(str(_keep(content, folder, kind)))
        except OSError as error:
            log.info("kernels: compiled at each start, as they cannot be kept in %s: %s", folder, error)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        return KernelLibrary(file.name)  # it stays loaded without the file


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
