"""Records on disk: numbered files that are only ever appended to, in a folder that one process has.

Owns: how records lie in a file, their checksums, what is left of a file after a crash, the lock of the folder.
Does not know: what records say, when a file is not needed any more, which thread it is on.

A file is ``MAGIC`` and frames as in ``engine/host/appended_file.py``: each payload is a msgpack array of records.  One
write makes one frame, so the records of a frame are there together or not at all.
"""

import fcntl
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from engine.host.appended_file import HEADER, AppendedFile, Frames, frame, whole_file
from engine.host.disk import make_folder, sync_folder
from engine.host.own_files import own_files
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

MAGIC = b"CBJRNL1\n"
ARRAY = struct.Struct(">BI")  # msgpack's array with a count of 32 bits
ARRAY_MARK = 0xDD
NAMED = re.compile(r"([0-9]{8}|[1-9][0-9]{8,})\.log")
LOCK = "lock"
LOCKED = re.compile(rb"[0-9]*\n?\0*")  # what a lock says; zeros are what a loss of power leaves
# A process that was killed lets go of the lock a moment after it is seen to be gone.
LOCK_WITHIN_S = 2.0
LOOK_EVERY_S = 0.05

FRAME_BYTES = HEADER.size + ARRAY.size  # of a frame besides its records
_PAYLOAD = msgspec.msgpack.Decoder(list[msgspec.Raw])


def frame_of(records: Sequence[bytes]) -> bytes:
    """Returns the frame of some records."""
    return frame(ARRAY.pack(ARRAY_MARK, len(records)) + b"".join(records))


class JournalSegments:
    """The files of a folder, of which the last one is written to.

    sizes: number of each file that records may still be needed of -> its bytes."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, making it if it is not there.  Raises ConfigError if that cannot be."""
        self.sizes: dict[int, int] = {}
        self._last = 0  # number that a file has or may get
        self._folder = folder
        self._file: AppendedFile | None = None
        self._left: list[AppendedFile] = []  # files that were written to and may not be synced
        self._found: list[int] = []  # those of an earlier process, which may have ended before it synced them
        self._is_new = False  # a file's name may not be synced
        self._lock = -1
        try:
            make_folder(folder)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            self._take_lock()
            self.sizes = dict(sorted((int(one.path.stem), one.num_bytes) for one in own_files(folder, NAMED)))
            self._last = max(self.sizes, default=0)
            self._found = list(self.sizes)
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            place = f"storage.folder: {error.filename or folder}: {error.strerror}"
            raise ConfigError(f"{place}; the journal needs a folder that it can write to") from None

    @property
    def current(self) -> int:
        """The file that is written to."""
        return max(self.sizes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(self.sizes.values())

    def read(self, number: int) -> Iterator[list[bytes]]:
        """Give the records of each frame of a file.  What is behind the last good one is cut off if it was torn, and
        left where it is, and said, if it is broken.  Raises ConfigError for a file that cannot be read."""
        path = self._path(number)
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"storage.folder: {path}: {error.strerror}") from None
        with file:
            head = file.read(len(MAGIC))
            if head != MAGIC[: len(head)]:
                log.warning("journal: %s is no file of this journal; it is left as it is", path)
                del self.sizes[number]
                return
            frames = Frames(file)
            for payload in frames:
                try:
                    records = [bytes(record) for record in _PAYLOAD.decode(payload)]
                except (msgspec.MsgspecError, RecursionError):
                    frames.broken = "damaged"
                    break
                yield records
        if frames.broken == "torn" and number == self.current:
            log.warning("journal: %s: the last record, at byte %d, was torn and is cut off", path, frames.end)
            os.truncate(path, frames.end)
            self.sizes[number] = frames.end
        elif frames.broken:
            log.warning("journal: %s: what lies from byte %d on is broken, and lost", path, frames.end)

    def reserve(self) -> int:
        """Returns the number of a file that ``copy`` makes, which lies in front of all that are begun from now on."""
        self._last += 1
        return self._last

    def begin(self, *, is_needed: bool = True) -> None:
        """Write to a new file from now on.  is_needed: what the old one has is.

        Raises OSError, and then goes on with the old one."""
        number, old = self.reserve(), self._file
        self._file = AppendedFile(self._path(number), MAGIC)
        self.sizes[number] = self._file.size
        self._is_new = True
        if old is not None:
            self._left.append(old)
        if not is_needed:
            self._close_left()

    def copy(self, number: int, entries: Iterable[Sequence[bytes]], *, is_synced: bool) -> int:
        """Write a file of a number that was reserved, a frame for each entry; returns its bytes.  For a thread.

        is_synced: it outlasts a loss of power then.  Raises OSError, and then there is no such file."""
        path = self._path(number)
        with whole_file(path, path, MAGIC, is_synced=is_synced) as file:
            for records in entries:
                file.append(frame_of(records))
            return file.size

    def write(self, records: Sequence[bytes]) -> None:
        """Append a frame.  Raises OSError, and then nothing of it is there."""
        assert self._file is not None, "no file was begun"
        self._file.append(frame_of(records))
        self.sizes[self.current] = self._file.size

    def unsynced(self) -> Callable[[], None]:
        """Returns what a thread has to call, once, so that all that was written and begun outlasts a loss of power.

        It waits, and raises OSError."""
        assert self._file is not None, "no file was begun"
        files: list[int] = []
        try:
            for descriptor in self._open_found():
                files.append(descriptor)
            for file in (*self._left, self._file):
                files.append(os.dup(file.descriptor))
        except OSError:  # no descriptor is free; the next call has all of them to do
            for descriptor in files:
                os.close(descriptor)
            raise
        self._found.clear()
        self._close_left()
        folder, self._is_new = self._folder if self._is_new else None, False

        def sync() -> None:
            try:
                for file in files:
                    os.fsync(file)
                if folder is not None:
                    sync_folder(folder)
            finally:
                for file in files:
                    os.close(file)

        return sync

    def remove(self, number: int) -> None:
        """Take a file away that is not written to."""
        assert number != self.current
        self._path(number).unlink(missing_ok=True)
        del self.sizes[number]

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._close_left()

    def _open_found(self) -> Iterator[int]:
        """Open the files of an earlier process: clients get what they have from now on."""
        for number in self._found:
            if number in self.sizes:
                yield os.open(self._path(number), os.O_RDONLY)

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.log"

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
