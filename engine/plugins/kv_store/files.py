"""Keeps KV pages as files, one a page, for every process that names the same folder, and for those that come later.

The folder is one that a store has made, and marked.  What else lies in it is no record by its name: it is not counted,
and never removed.  A file is written under a name of its own, and renamed when it is whole: half of one is never
read.  What a crash of the machine leaves damaged is found by its digest and forgotten.  A file's modification time is
that of its last use; when all files together are too large, those used longest ago go, in one sweep at a time over all
processes.
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
KEPT_SHARE = 0.9  # of what is allowed, after a sweep: one for each file would cost more than the files
RECOUNTS = 16  # others write too: all is counted again whenever so large a part of what is allowed has been written
ABANDONED_S = 600.0  # a file being written for so long is a dead process's
MARK = "callboard-kv-store"
LOCK = "sweep.lock"
INCOMING = "incoming"
FOLDER = re.compile(rf"[0-9a-f]{{2}}|{INCOMING}")
RECORD = re.compile(r"[0-9a-f]{64}")
BEGUN = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}|.+-[0-9]+-[0-9]{9,}-[0-9]+")  # the second as earlier versions wrote it


class FilesOptions(Options, frozen=True):
    """path: the folder, made if it is not there, and refused if it has files of others; auto is
    ~/.cache/callboard/kv_store.  max_gb: of all files together.
    sync: have each file on the disk before it counts; else a crash of the machine, not of a process, costs some."""

    path: str = "auto"
    max_gb: Annotated[float, Meta(gt=0)] = 16.0
    sync: bool = False


class FileStore:
    """``path/ab/abcd...`` by name.

    Raises OSError if the folder cannot be made or written to, ConfigError if it has anything that no store wrote."""

    def __init__(self, path: Path, max_bytes: int, *, sync: bool = False) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._sync = sync
        self._incoming = path / INCOMING
        make_folder(path)  # for this user alone: pages tell of prompts
        self._mark()
        self._incoming.mkdir(exist_ok=True)
        self._lock = path / LOCK
        self._lock.touch()
        self._num_bytes = self._num_since_count = 0
        self._sweep()

    def _mark(self) -> None:
        """Mark a folder that is empty, or an earlier version's.  Another process may do the same at the same time."""
        names, mark = os.listdir(self._path), self._path / MARK
        if mark.exists():
            return
        if names and (strange := self._strange(names)):
            raise ConfigError(
                f"kv_store.files: path={str(self._path)!r} has {strange}, which no such store wrote; name an empty "
                "folder, or one that is not there yet, since a store removes its oldest files"
            )
        with mark.open("w") as file:
            file.write("This folder is a page store of callboard, which removes its records when they are too many.\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._path)

    def _strange(self, names: list[str]) -> str:
        """The first thing in a folder without a mark that an earlier version did not write; '' if it wrote all."""
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
                    continue  # its process was faster, or another one swept


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a store would put files there."""
    return FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _is_own(folder: str, entry: os.DirEntry[str]) -> bool:
    """Whether a store wrote it, by its name: a record, or what was to be one."""
    if folder == INCOMING:
        named = BEGUN.fullmatch(entry.name) is not None
    else:
        named = RECORD.fullmatch(entry.name) is not None and entry.name.startswith(folder)
    return named and entry.is_file(follow_symlinks=False)


@hookimpl
def callboard_kv_store(context: KVStoreContext) -> FileStore:
    """Options: see ``FilesOptions``."""
    options = decode_options("kv_store.files", context.options, FilesOptions)
    path = Path(DEFAULT_PATH if options.path == "auto" else options.path).expanduser()
    try:
        return FileStore(path, int(options.max_gb * 1e9), sync=options.sync)
    except OSError as error:
        raise PluginError(f"kv_store.files: path={str(path)!r} cannot be used: {error}; name another folder") from None
