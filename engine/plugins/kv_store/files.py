"""Keeps KV pages as files, one a page, for every process that names the same folder, and for those that come later.

A file is written under a name of its own, and renamed when it is whole: nobody ever reads half of one.  What a crash of
the machine leaves damaged is found by its digest and forgotten.  A file's modification time is that of its last use;
when all files together are too large, those used longest ago go, in one sweep at a time over all processes.
"""

import contextlib
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from engine.errors import PluginError
from engine.plugins.hookspecs import KVStoreContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1, "packages": ["fcntl"]}

DEFAULT_PATH = "~/.cache/callboard/kv_store"
KEPT_SHARE = 0.9  # of what is allowed, after a sweep: one for each file would cost more than the files
RECOUNTS = 16  # others write too: all is counted again whenever so large a part of what is allowed has been written
ABANDONED_S = 600.0  # a file being written for so long is a dead process's


class FilesOptions(Options, frozen=True):
    """path: the folder, made if it is not there; auto is ~/.cache/callboard/kv_store.  max_gb: of all files together.
    sync: have each file on the disk before it counts; else a crash of the machine, not of a process, costs some."""

    path: str = "auto"
    max_gb: Annotated[float, Meta(gt=0)] = 16.0
    sync: bool = False


class FileStore:
    """``path/ab/abcd...`` by name.  Raises OSError if the folder cannot be made or written to."""

    def __init__(self, path: Path, max_bytes: int, *, sync: bool = False) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._sync = sync
        self._numbers = itertools.count()
        self._incoming = path / "incoming"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # pages tell of prompts
        self._incoming.mkdir(exist_ok=True)
        self._lock = path / "sweep.lock"
        self._lock.touch()
        self._num_bytes = self._num_since_count = 0
        self._sweep()

    def get(self, name: bytes, record: memoryview) -> bool:
        path = self._place(name)
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(record):
                    return False
                at = 0
                while at < len(record) and (count := file.readinto(record[at:])):
                    at += count
                os.utime(file.fileno())
                return at == len(record)
        except FileNotFoundError:
            return False

    def put(self, name: bytes, record: memoryview) -> None:
        """See ``KVStore``.  Raises OSError, a full disk's for one, and then nothing is left of it."""
        path = self._place(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(record):
                os.utime(path)
                return
        if len(record) > self._max_bytes:
            return
        if self._num_bytes + len(record) > self._max_bytes or self._num_since_count > self._max_bytes // RECOUNTS:
            self._sweep(room_for=len(record))
        incoming = self._incoming / f"{os.uname().nodename}-{os.getpid()}-{id(self)}-{next(self._numbers)}"
        try:
            with incoming.open("xb", buffering=0) as file:
                at = 0
                while at < len(record):
                    at += file.write(record[at:])
                if self._sync:
                    os.fsync(file.fileno())
            path.parent.mkdir(exist_ok=True)
            incoming.replace(path)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        if self._sync:
            _sync_folder(path.parent)
        self._num_bytes += len(record)
        self._num_since_count += len(record)

    def discard(self, name: bytes) -> None:
        self._place(name).unlink(missing_ok=True)

    def close(self) -> None:
        """See ``KVStore``."""

    def _place(self, name: bytes) -> Path:
        text = name.hex()
        return self._path / text[:2] / text

    def _sweep(self, room_for: int = 0) -> None:
        """Count all files, and remove those used longest ago if they are too many; unless another process does it."""
        self._num_since_count = 0
        with self._lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._num_bytes = 0  # the other one makes room; counted again soon
                return
            files = sorted(self._files())
            num_bytes = sum(size for _, size, _ in files)
            if num_bytes + room_for > self._max_bytes:
                kept = min(int(self._max_bytes * KEPT_SHARE), self._max_bytes - room_for)
                for _, size, path in files:
                    if num_bytes <= kept:
                        break
                    Path(path).unlink(missing_ok=True)
                    num_bytes -= size
            self._num_bytes = num_bytes

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Last use, size and path of every record; what dead processes have begun to write is removed."""
        for folder in os.scandir(self._path):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder.path):
                try:
                    found = entry.stat()
                    if folder.name != self._incoming.name and stat.S_ISREG(found.st_mode):
                        yield found.st_mtime_ns, found.st_size, entry.path
                    elif found.st_mtime < time.time() - ABANDONED_S:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # its process was faster, or another one swept


def _sync_folder(path: Path) -> None:
    """A rename is on the disk when its folder is."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@hookimpl
def callboard_kv_store(context: KVStoreContext) -> FileStore:
    """Options: see ``FilesOptions``."""
    options = decode_options("kv_store.files", context.options, FilesOptions)
    path = Path(DEFAULT_PATH if options.path == "auto" else options.path).expanduser()
    try:
        return FileStore(path, int(options.max_gb * 1e9), sync=options.sync)
    except OSError as error:
        raise PluginError(f"kv_store.files: path={str(path)!r} cannot be used: {error}; name another folder") from None
