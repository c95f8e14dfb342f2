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
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from msgspec import Meta

from engine.host.appended_file import whole_file
from engine.host.disk import make_folder, sync_folder
from engine.host.own_files import own_files, remove_oldest
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
RECORD = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")
# The second as earlier versions wrote it.
BEGUN = re.compile(rf"{INCOMING}/([0-9a-f]{{64}}\.[0-9a-f]{{32}}|.+-[0-9]+-[0-9]{{9,}}-[0-9]+)")


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
        make_folder(path)  # for this user alone: pages reveal prompts
        self._mark()
        (path / INCOMING).mkdir(exist_ok=True)
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
        own = {self._path / LOCK, self._path / MARK}
        own.update(one.path for named in (RECORD, BEGUN) for one in own_files(self._path, named, FOLDER))
        folders = (self._path / name for name in names if FOLDER.fullmatch(name))
        own.update(one for one in folders if one.is_dir() and not one.is_symlink())
        return min((str(one.relative_to(self._path)) for one in self._path.rglob("*") if one not in own), default="")

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
        """Write a record.  Raises OSError, e.g. on a full disk, after removing the unfinished file."""
        path = self._place(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(record):
                os.utime(path)
                return
        if len(record) > self._max_bytes:
            return
        if self._num_bytes + len(record) > self._max_bytes or self._num_since_count > self._max_bytes // RECOUNTS:
            self._sweep(room_for=len(record))
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            if self._sync:
                sync_folder(self._path)
        begun = self._path / INCOMING / f"{path.name}.{uuid4().hex}"
        with whole_file(path, begun, is_synced=self._sync) as file:
            file.append(record)
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
            for begun in own_files(self._path, BEGUN, FOLDER):
                if begun.changed_ns < (time.time() - ABANDONED_S) * 1e9:
                    begun.path.unlink(missing_ok=True)  # its process is dead
            files = own_files(self._path, RECORD, FOLDER)
            self._num_bytes = sum(one.num_bytes for one in files)
            if self._num_bytes + room_for > self._max_bytes:
                kept = min(int(self._max_bytes * KEPT_SHARE), self._max_bytes - room_for)
                self._num_bytes = remove_oldest(files, kept)


@hookimpl
def callboard_kv_store(context: KVStoreContext) -> FileStore:
    """Build the store with ``FilesOptions``."""
    options = decode_options("kv_store.files", context.options, FilesOptions)
    path = Path(DEFAULT_PATH if options.path == "auto" else options.path).expanduser()
    try:
        return FileStore(path, int(options.max_gb * 1e9), sync=options.sync)
    except OSError as error:
        raise PluginError(f"kv_store.files: path={str(path)!r} cannot be used: {error}; name another folder") from None
