"""Stores KV pages as files, one per page, for all processes that use the same folder, and for later ones.

The folder must have been made and marked by a store.  Other files in it are recognised by their names: they are not
counted, and never removed.  A file is written under a temporary name and renamed when it is complete, so half a file is
never read.  Files damaged by a crash of the machine are detected by their digest and forgotten.  A file's modification
time is that of its last use; when all files together are too large, the least recently used are removed, in one sweep
at a time over all processes.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from msgspec import Meta

from engine.host.disk import make_folder, sync_folder
from engine.plugins.hookspecs import KVStoreContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import ConfigError, PluginError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["fcntl"]}

DEFAULT_PATH = "~/.cache/callboard/kv_store"
KEPT_SHARE = 0.9  # of the limit, after a sweep: a sweep per file would cost more than the files
RECOUNTS = 16  # recount after writing this fraction of the limit, since other processes write too
ABANDONED_S = 600.0  # an unfinished file of this age belongs to a dead process
MARK = "callboard-kv-store"
LOCK = "sweep.lock"
INCOMING = "incoming"
FOLDER = re.compile(rf"[0-9a-f]{{2}}|{INCOMING}")
RECORD = re.compile(r"[0-9a-f]{64}")
BEGUN = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}|.+-[0-9]+-[0-9]{9,}-[0-9]+")  # the second: of earlier versions


class FilesOptions(Options, frozen=True):
    """Options of the plugin.

    path: the folder; made if missing, and refused if it has other files; auto is ~/.cache/callboard/kv_store.
    max_gb: of all files together.
    sync: write each file to the disk before it counts; else a crash of the machine, not of a process, loses some."""

    path: str = "auto"
    max_gb: Annotated[float, Meta(gt=0)] = 16.0
    sync: bool = False


class FileStore:
    """A store with files ``path/ab/abcd...`` by name.

    Raises OSError if the folder cannot be made or written to, ConfigError if it has files that no store wrote."""

    def __init__(self, path: Path, max_bytes: int, *, sync: bool = False) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._sync = sync
        self._incoming = path / INCOMING
        make_folder(path)  # for this user alone: pages reveal prompts
        self._mark()
        self._incoming.mkdir(exist_ok=True)
        self._lock = path / LOCK
        self._lock.touch()
        self._num_bytes = self._num_since_count = 0
        self._sweep()

    def _mark(self) -> None:
        """Mark an empty folder, or one of an earlier version.  Another process may do so at the same time."""
        names, mark = os.listdir(self._path), self._path / MARK
        if mark.exists():
            return
        if names and (strange := self._strange(names)):
            raise ConfigError(
                f"kv_store.files: path={str(self._path)!r} has {strange}, which no such store wrote; name an empty or "
                "new folder, since a store removes its oldest files"
            )
        with mark.open("w") as file:
            file.write("This folder is a page store of callboard, which removes its records when they are too many.\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._path)

    def _strange(self, names: list[str]) -> str:
        """Return the first entry of an unmarked folder that no earlier version wrote; '' if there is none."""
        if LOCK not in names or INCOMING not in names:
            return min(names)
        with os.scandir(self._path) as entries:
            strange = [one.name for one in entries if not _is_folder(one) and one.name not in (LOCK, MARK)]
        for name in () if strange else os.listdir(self._path):
            if (folder := self._path / name).is_dir():
                with os.scandir(folder) as entries:
                    strange += [f"{name}/{one.name}" for one in entries if not _is_own(name, one)]
        return min(strange, default="")

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
        """Keep a copy of the record.  Raises OSError, e.g. on a full disk, after removing the unfinished file."""
        path = self._place(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(record):
                os.utime(path)
                return
        if len(record) > self._max_bytes:
            return
        if self._num_bytes + len(record) > self._max_bytes or self._num_since_count > self._max_bytes // RECOUNTS:
            self._sweep(room_for=len(record))
        incoming = self._incoming / f"{path.name}.{uuid4().hex}"
        try:
            with incoming.open("xb", buffering=0) as file:
                at = 0
                while at < len(record):
                    at += file.write(record[at:])
                if self._sync:
                    os.fsync(file.fileno())
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                if self._sync:
                    sync_folder(self._path)
            incoming.replace(path)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        if self._sync:
            sync_folder(path.parent)
        self._num_bytes += len(record)
        self._num_since_count += len(record)

    def discard(self, name: bytes) -> None:
        self._place(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _place(self, name: bytes) -> Path:
        text = name.hex()
        return self._path / text[:2] / text

    def _sweep(self, room_for: int = 0) -> None:
        """Count all files, and remove the least recently used if they are too large, unless another process does."""
        self._num_since_count = 0
        with self._lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._num_bytes = 0  # the other process makes room; recounted soon
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
        """Yield last use, size and path of every record; unfinished files of dead processes are removed."""
        for folder in os.scandir(self._path):
            for entry in os.scandir(folder.path) if _is_folder(folder) else ():
                try:
                    if not _is_own(folder.name, entry):
                        continue
                    found = entry.stat(follow_symlinks=False)
                    if folder.name != INCOMING:
                        yield found.st_mtime_ns, found.st_size, entry.path
                    elif found.st_mtime < time.time() - ABANDONED_S:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # its own process or another sweep removed it


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a store puts files into this folder."""
    return FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _is_own(folder: str, entry: os.DirEntry[str]) -> bool:
    """Whether a store wrote this file, by its name: a record, or an unfinished one."""
    if folder == INCOMING:
        named = BEGUN.fullmatch(entry.name) is not None
    else:
        named = RECORD.fullmatch(entry.name) is not None and entry.name.startswith(folder)
    return named and entry.is_file(follow_symlinks=False)


@hookimpl
def callboard_kv_store(context: KVStoreContext) -> FileStore:
    """Build the store with ``FilesOptions``."""
    options = decode_options("kv_store.files", context.options, FilesOptions)
    path = Path(DEFAULT_PATH if options.path == "auto" else options.path).expanduser()
    try:
        return FileStore(path, int(options.max_gb * 1e9), sync=options.sync)
    except OSError as error:
        raise PluginError(f"kv_store.files: path={str(path)!r} cannot be used: {error}; name another folder") from None
