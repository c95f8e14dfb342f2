"""Carries KV pages by reads of another machine's memory, whatever library makes them.

Owns: the memory that others read, where pages arrive, the thread that reads.  Does not know: the library.
Messages go by ``transfer.tcp``, so only processes with the secret take part.  Pages are written to a ring of the
sender, and their place goes with the message; the receiver reads them, and then has the message.  A ring that has come
round before the read makes damaged pages, which a digest shows.
"""

import ctypes
import logging
import mmap
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from engine.plugins.hookspecs import TransferContext
from engine.plugins.transfer.options import check_ring
from engine.plugins.transfer.tcp import TcpOptions, TcpTransfer
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

LEAST_READ: Final = 32 << 10  # bytes; fewer go with their message
MOST_NOTED: Final = 256  # messages whose pages wait to be read


class RemoteReadOptions(TcpOptions, frozen=True, kw_only=True):
    """Options of such a plugin, besides those of every carrier and of transfer.tcp.

    ring_mb: megabytes of each rank's memory that others read."""

    ring_mb: Annotated[int, Meta(ge=1)] = 64


class Memory:
    """Bytes at an address that does not change."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def put(self, at: int, content: bytes) -> None:
        """Write bytes."""
        self._map[at : at + len(content)] = content

    def first(self, num_bytes: int) -> bytes:
        """Return the first bytes."""
        return self._map[:num_bytes]


class MemoryReader(Protocol):
    """A library that reads the memory of other processes.  pass_on: what another one needs to read here."""

    pass_on: bytes

    def read(self, source: bytes, address: int, num_bytes: int) -> bool:
        """Read into the memory for arrivals, and return whether all came.  source: the other's ``pass_on``.

        It may raise any error."""
        ...

    def close(self) -> None:
        """End."""
        ...


class _ReadNote(msgspec.Struct, frozen=True, array_like=True):
    """A message, and where the bytes after it lie; source: '' if they came with it."""

    message: bytes
    source: bytes = b""
    address: int = 0
    num_bytes: int = 0


class RemoteReadTransfer:
    """One rank's messages, memory and reads.  new_reader: builds the reader of the ring and of the arrivals' memory.

    Raises PluginError.  plugin: for its text."""

    def __init__(
        self,
        context: TransferContext,
        options: RemoteReadOptions,
        plugin: str,
        new_reader: Callable[[Memory, Memory], MemoryReader],
    ) -> None:
        check_ring(plugin, options.ring_mb, context.group_bytes)
        self._receive = context.receive
        self._ring, self._arrivals = Memory(options.ring_mb << 20), Memory(context.most_bytes)
        self._at = 0
        self._notes = msgspec.msgpack.Decoder(_ReadNote)
        self._arrived: queue.Queue[_ReadNote | None] = queue.Queue(MOST_NOTED)
        self._receiving = threading.Lock()
        self._is_closed = False
        self._reader = new_reader(self._ring, self._arrivals)
        try:
            self._messages = TcpTransfer(replace(context, receive=self._noted), options)
        except BaseException as error:
            self._reader.close()
            if isinstance(error, PluginError):
                raise PluginError(str(error).replace("transfer.tcp", plugin)) from None
            raise
        self.address = self._messages.address
        self.locate = self._messages.locate
        self._thread = threading.Thread(target=self._run, name=f"{plugin}{context.rank}", daemon=True)
        self._thread.start()

    def send(self, address: str, message: bytes, payload: bytes) -> None:
        """Write pages to the ring, and send the message with their place."""
        size = len(payload)
        if self._is_closed or size > self._ring.num_bytes:
            return
        if size < LEAST_READ:
            self._messages.send(address, msgspec.msgpack.encode(_ReadNote(message)), payload)
            return
        if self._at + size > self._ring.num_bytes:
            self._at = 0
        place, self._at = self._at, self._at + size
        self._ring.put(place, payload)
        note = _ReadNote(message, self._reader.pass_on, self._ring.address + place, size)
        self._messages.send(address, msgspec.msgpack.encode(note), b"")

    def close(self) -> None:
        """End the thread, the reader and all connections."""
        if self._is_closed:
            return
        self._is_closed = True
        self._messages.close()
        with suppress(queue.Empty):  # the thread takes some too
            while True:
                self._arrived.get_nowait()
        self._arrived.put(None)
        self._thread.join()
        self._reader.close()

    def _noted(self, frame: bytes, payload: bytes) -> None:
        """Take a message, on the thread of messages."""
        try:
            note = self._notes.decode(frame)
        except msgspec.MsgspecError:
            return
        if not note.source:
            self._pass_on(note.message, payload)
        elif 0 < note.num_bytes <= self._arrivals.num_bytes and not self._arrived.full():
            self._arrived.put_nowait(note)

    def _run(self) -> None:
        while (note := self._arrived.get()) is not None:
            try:
                has_come = self._reader.read(note.source, note.address, note.num_bytes)
            except Exception:  # the other engine's message is lost, and others are read
                log.exception("pages of another engine could not be read")
                has_come = False
            if has_come:
                self._pass_on(note.message, self._arrivals.first(note.num_bytes))

    def _pass_on(self, message: bytes, payload: bytes) -> None:
        with self._receiving:
            if not self._is_closed:
                self._receive(message, payload)
