"""A file that is only appended to, and frames in it that a crash leaves whole or not at all.

Owns: appending all of some data or nothing, the frame's format, reading up to the last whole frame.
Does not know: what a frame says, which files there are, what to do with a torn end.
A frame is the length and the CRC-32 of its payload, each 32 bits, little-endian, and the payload, which is not empty.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engine.host.disk import sync_folder

HEADER = struct.Struct("<II")


def frame(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


class Frames:
    """The payloads of a file's whole frames, in order; the file is open behind what lies in front of them.

    end: the offset behind the last whole frame.  broken: what lies there, '' for the end of the file: 'torn' where a
    write did not get to its end, 'damaged' where other data follows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.end = file.tell()
        self.broken = ""

    def __iter__(self) -> Iterator[bytes]:
        while self.end < self._size:
            header = self._file.read(HEADER.size)
            length, checksum = HEADER.unpack(header) if len(header) == HEADER.size else (self._size, 0)
            payload = self._file.read(min(length, self._size))  # a damaged header may have any length
            if not payload or len(payload) < length or zlib.crc32(payload) != checksum:
                self.broken = "torn" if self.end + HEADER.size + length >= self._size else "damaged"
                return
            yield payload
            self.end += HEADER.size + length


class AppendedFile:
    """A new file that is only appended to, for this user alone.  descriptor: -1 once it is closed.  size: its bytes."""

    def __init__(self, path: Path, head: bytes = b"") -> None:
        """Make the file, with what it begins with.  Raises OSError, and then there is no such file."""
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.size = 0
        try:
            self.append(head)
        except OSError:
            self.close()
            path.unlink()
            raise

    def append(self, data: bytes | memoryview) -> None:
        """Append all of the data.  Raises OSError, and then nothing of the data is in the file."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self.descriptor, data[written:])
        except OSError:
            os.ftruncate(self.descriptor, self.size)
            raise
        self.size += written

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def whole_file(path: Path, begun: Path, head: bytes = b"", *, is_synced: bool) -> Iterator[AppendedFile]:
    """Write a file under the name ``begun``.  It gets its own name when it is whole, and is removed if that fails.

    head: what it begins with.  is_synced: the file and its name outlast a loss of power then.  Raises OSError."""
    file = AppendedFile(begun, head)
    try:
        yield file
        if is_synced:
            os.fsync(file.descriptor)
        begun.replace(path)
        if is_synced:
            sync_folder(path.parent)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    finally:
        file.close()
