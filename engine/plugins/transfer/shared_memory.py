"""Carries KV pages between engines of one machine and one user, through shared memory.

Every rank has a ring of bytes that its peers map, and a Unix datagram socket, both in one directory that is closed to
other users.  A message is written to the sender's own ring, and a datagram with its place goes to the receiver, which
copies it.  A ring that has come round to a message before that was copied makes a damaged message, which is lost.
"""

import fcntl
import mmap
import os
import re
import socket
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from engine.plugins.hookspecs import TransferContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.transfer.options import CarrierOptions, check_ring
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["fcntl"]}

ADDRESS: Final = re.compile(r"[A-Za-z0-9_-]{1,48}\.[0-9]{1,5}")
NOTE: Final = struct.Struct("<QQIII")  # inode of the ring, place, length of message and payload, checksum of message
MOST_RINGS: Final = 64  # of peers, that stay mapped
MOST_NOTE: Final = 256
BUFFER_BYTES: Final = 1 << 20  # of datagrams that wait


class SharedMemoryOptions(CarrierOptions, frozen=True, kw_only=True):
    """Options of the plugin, besides those of every carrier.

    path: the directory; it must be the user's and closed to others, and is made if missing; auto is in /dev/shm.
    ring_mb: megabytes of each rank's ring."""

    path: str = "auto"
    ring_mb: Annotated[int, Meta(ge=1)] = 64


class SharedMemoryTransfer:
    """One rank's ring and socket.  Raises PluginError for a directory that others may enter, or a name in use."""

    def __init__(self, context: TransferContext, name: str, folder: Path, ring_bytes: int) -> None:
        self.address = f"{name}.{context.rank}"
        self._receive = context.receive
        self._folder = folder
        self._rank = context.rank
        _make_private(folder)
        self._lock = self._own_name()
        for kind in ("ring", "socket"):
            with suppress(FileNotFoundError):
                self._path(self.address, kind).unlink()
        ring = os.open(
            self._path(self.address, "ring"), os.O_CREAT | os.O_EXCL | os.O_RDWR, stat.S_IRUSR | stat.S_IWUSR
        )
        os.ftruncate(ring, ring_bytes)
        self._ring = mmap.mmap(ring, ring_bytes)
        self._inode = os.fstat(ring).st_ino
        os.close(ring)
        self._at = 0
        self._rings: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind(str(self._path(self.address, "socket")))
        self._is_closed = False
        self._thread = threading.Thread(target=self._read_all, name=f"transfer{context.rank}", daemon=True)
        self._thread.start()

    def locate(self, name: str) -> str:
        """Return the address of a peer of this machine, which may or may not be there."""
        address = f"{name}.{self._rank}"
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"{name!r} is no name of an engine")
        return address

    def send(self, address: str, message: bytes, payload: bytes) -> None:
        """Write to the ring, and send its place."""
        size = len(message) + len(payload)
        if self._is_closed or size > len(self._ring) or not ADDRESS.fullmatch(address):
            return
        if self._at + size > len(self._ring):
            self._at = 0
        place, self._at = self._at, self._at + size
        self._ring[place : place + len(message)] = message
        self._ring[place + len(message) : place + size] = payload
        note = NOTE.pack(self._inode, place, len(message), len(payload), zlib.crc32(message)) + self.address.encode()
        with suppress(OSError):  # no such peer now, or it is behind
            self._socket.sendto(note, socket.MSG_DONTWAIT, str(self._path(address, "socket")))

    def close(self) -> None:
        """End the thread, and remove the ring and the socket."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()
        for kind in ("socket", "ring"):
            with suppress(FileNotFoundError):
                self._path(self.address, kind).unlink()
        for ring in (self._ring, *self._rings.values()):
            ring.close()
        os.close(self._lock)

    # ---- internals --------------------------------------------------------------------------

    def _path(self, address: str, kind: str) -> Path:
        return self._folder / f"{address}.{kind}"

    def _own_name(self) -> int:
        """Return a locked file, which keeps other processes from the name."""
        lock = os.open(self._path(self.address, "lock"), os.O_CREAT | os.O_RDWR, stat.S_IRUSR | stat.S_IWUSR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise PluginError(
                f"transfer.shared_memory: another engine uses the name {self.address!r} in {self._folder}; set "
                "plugins.options.'transfer.shared_memory'.name to one of its own"
            ) from None
        return lock

    def _read_all(self) -> None:
        while not self._is_closed:
            try:
                note = self._socket.recv(MOST_NOTE)
            except OSError:
                return
            if (read := self._read(note)) is not None and not self._is_closed:
                self._receive(*read)

    def _read(self, note: bytes) -> tuple[bytes, bytes] | None:
        """Return the message that a datagram names, and its payload; None for one that is gone or no message."""
        address = note[NOTE.size :].decode("ascii", "replace")
        if len(note) <= NOTE.size or not ADDRESS.fullmatch(address):
            return None
        inode, place, num_message, num_payload, checksum = NOTE.unpack(note[: NOTE.size])
        ring = self._ring_of(address, inode)
        if ring is None or place + num_message + num_payload > len(ring):
            return None
        message = ring[place : place + num_message]
        payload = ring[place + num_message : place + num_message + num_payload]
        return (message, payload) if zlib.crc32(message) == checksum else None

    def _ring_of(self, address: str, inode: int) -> mmap.mmap | None:
        """Return a peer's ring, as long as the peer is the one that has sent."""
        if (ring := self._rings.get((address, inode))) is not None:
            self._rings.move_to_end((address, inode))
            return ring
        try:
            file = os.open(self._path(address, "ring"), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if found.st_ino != inode or found.st_uid != os.getuid() or not found.st_size:
                return None
            ring = self._rings[address, inode] = mmap.mmap(file, found.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        if len(self._rings) > MOST_RINGS:
            self._rings.popitem(last=False)[1].close()
        return ring


def _make_private(folder: Path) -> None:
    """Make the directory.  Raises PluginError unless it is the user's own and closed to others."""
    try:
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise PluginError(f"transfer.shared_memory: {folder} cannot be used: {error.strerror}; set path") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PluginError(
            f"transfer.shared_memory: {folder} must be a directory of user {os.getuid()} that is closed to others "
            f"(mode 0700), and has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}; set path"
        )


@hookimpl
def callboard_transfer(context: TransferContext) -> SharedMemoryTransfer:
    """Build the carrier."""
    options = decode_options("transfer.shared_memory", context.options, SharedMemoryOptions)
    auto = f"/dev/shm/callboard-{os.getuid()}"  # noqa: S108
    folder = Path(auto if options.path == "auto" else options.path).expanduser()
    check_ring("transfer.shared_memory", options.ring_mb, context.group_bytes)
    return SharedMemoryTransfer(context, options.name, folder, options.ring_mb << 20)
