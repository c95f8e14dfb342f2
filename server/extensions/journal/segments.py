"""Records on disk: numbered files that are only ever appended to, in a folder that one process has.

Owns: how records lie in a file, their checksums, what is left of a file after a crash, the lock of the folder.
Does not know: what records say, when a file is not needed any more, which thread it is on.

A file is ``MAGIC`` and frames; a frame is the length and the CRC-32 of its payload, and the payload: a msgpack array of
records.  One write makes one frame, so the records of a frame are there together or not at all.
"""

import fcntl
import logging
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from engine.host.disk import make_folder, sync_folder
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

MAGIC = b"CBJRNL1\n"
HEADER = struct.Struct("<II")
ARRAY = struct.Struct(">BI")  # msgpack's array with a count of 32 bits
ARRAY_MARK = 0xDD
SUFFIX = ".log"
NUMBER = re.compile("[0-9]+")
LOCK = "lock"
LOCKED = re.compile(rb"[0-9]*\n?\0*")  # what a lock says; zeros are what a loss of power leaves
# A process that was killed lets go of the lock a moment after it is seen to be gone.
LOCK_WITHIN_S = 2.0
LOOK_EVERY_S = 0.05

_PAYLOAD = msgspec.msgpack.Decoder(list[msgspec.Raw])


def frame(records: Sequence[bytes]) -> bytes:
    """Returns the frame of some records."""
    payload = ARRAY.pack(ARRAY_MARK, len(records)) + b"".join(records)
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


class Segments:
    """The files of a folder, of which the last one is written to.

    sizes: number of each file that records may still be needed of -> its bytes."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, making it if it is not there.  Raises ConfigError if that cannot be."""
        self.sizes: dict[int, int] = {}
        self._last = 0  # number that a file has or may get
        self._folder = folder
        self._file = -1
        self._left: list[int] = []  # descriptors of files that were written to and may not be synced
        self._is_new = False  # a file's name may not be synced
        self._lock = -1
        try:
            make_folder(folder)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            self._take_lock()
            named = [path for path in folder.glob(f"*{SUFFIX}") if NUMBER.fullmatch(path.stem)]
            numbers = sorted(number for path in named if self._path(number := int(path.stem)) == path)
            self.sizes = {number: self._path(number).stat().st_size for number in numbers}
            self._last = max(numbers, default=0)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"storage.folder: {error.filename or folder}: {error.strerror}; the journal needs a folder that it can "
                "write to"
            ) from None
        except ConfigError:
            self.close()
            raise

    @property
    def current(self) -> int:
        """The file that is written to."""
        return max(self.sizes)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(self.sizes.values())

    def read(self, number: int) -> Iterator[list[bytes]]:
        """Give the records of each frame of a file.  What is behind the last good one is cut off if it was torn, and
        left where it is, and said, if it is broken.  Raises ConfigError for a file that cannot be read."""
        path = self._path(number)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"storage.folder: {path}: {error.strerror}") from None
        if content[: len(MAGIC)] != MAGIC[: len(content)]:
            log.warning("journal: %s is no file of this journal; it is left as it is", path)
            del self.sizes[number]
            return
        offset = len(MAGIC)
        while offset < len(content):
            end = offset + HEADER.size
            length, checksum = HEADER.unpack(content[offset:end]) if end <= len(content) else (len(content), 0)
            payload = content[end : end + length]
            is_last = end + length >= len(content)
            records = _read_payload(payload) if len(payload) == length and zlib.crc32(payload) == checksum else None
            if records is None:
                if is_last and number == self.current:
                    log.warning("journal: %s: the last record, at byte %d, was torn and is cut off", path, offset)
                    os.truncate(path, offset)
                    self.sizes[number] = offset
                else:
                    log.warning("journal: %s: what lies from byte %d on is broken, and lost", path, offset)
                return
            yield records
            offset = end + length

    def reserve(self) -> int:
        """Returns the number of a file that ``copy`` makes, which lies in front of all that are begun from now on."""
        self._last += 1
        return self._last

    def begin(self, *, is_needed: bool = True) -> None:
        """Write to a new file from now on.  is_needed: what the old one has is.

        Raises OSError, and then goes on with the old one."""
        number = self.reserve()
        old, path = self._file, self._path(number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.sizes[number] = 0
        try:
            self._append(MAGIC)
        except OSError:
            os.close(self._file)
            self._file = old
            del self.sizes[number]
            path.unlink()
            raise
        self._is_new = True
        if old >= 0:
            self._left.append(old)
        if not is_needed:
            self._close_left()

    def copy(self, number: int, entries: Iterable[Sequence[bytes]], *, is_synced: bool) -> int:
        """Write a file of a number that was reserved, a frame for each entry; returns its bytes.  For a thread.

        is_synced: it outlasts a loss of power then.  Raises OSError, and then there is no such file."""
        path, size = self._path(number), 0
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for data in (MAGIC, *map(frame, entries)):
                    size += _write_all(file, data)
                if is_synced:
                    os.fsync(file)
            finally:
                os.close(file)
            if is_synced:
                sync_folder(self._folder)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return size

    def write(self, records: Sequence[bytes]) -> None:
        """Append a frame.  Raises OSError, and then nothing of it is there."""
        self._append(frame(records))

    def _append(self, data: bytes) -> None:
        number = self.current
        size = self.sizes[number]
        try:
            _write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self.sizes[number] = size + len(data)

    def unsynced(self) -> Callable[[], None]:
        """Returns what a thread has to call, once, so that all that was written and begun outlasts a loss of power.

        It waits, and raises OSError."""
        files, self._left = [*self._left, os.dup(self._file)], []
        folder, self._is_new = self._folder if self._is_new else None, False
        return partial(_sync, files, folder)

    def remove(self, number: int) -> None:
        """Take a file away that is not written to."""
        assert number != self.current
        self._path(number).unlink(missing_ok=True)
        del self.sizes[number]

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1
        self._close_left()

    def _close_left(self) -> None:
        while self._left:
            os.close(self._left.pop())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{SUFFIX}"

    def _take_lock(self) -> None:
        """Raises ConfigError if another process has it."""
        deadline = time.monotonic() + LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOOK_EVERY_S)
                    continue
                holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"storage.folder: {self._folder} is in use by another server (process {holder or '?'}); "
                    "give each a folder of its own"
                ) from None
        if not LOCKED.fullmatch(os.pread(self._lock, 32, 0)):
            raise ConfigError(f"storage.folder: {self._folder / LOCK} is no lock of a journal; name another folder")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)


def _read_payload(payload: bytes) -> list[bytes] | None:
    try:
        return [bytes(record) for record in _PAYLOAD.decode(payload)]
    except (msgspec.MsgspecError, RecursionError):
        return None


def _write_all(file: int, data: bytes) -> int:
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])
    return written


def _sync(files: Sequence[int], folder: Path | None) -> None:
    """Sync files, close them, and sync the folder that has new ones."""
    try:
        for file in files:
            os.fsync(file)
        if folder is not None:
            sync_folder(folder)
    finally:
        for file in files:
            os.close(file)
