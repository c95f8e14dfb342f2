"""What the host tells the device between decode steps, and what it gets back, in page-locked memory.

Owns: when such memory may be written again.  Does not know: what is in it.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

from engine.execution.captured_steps import Event
from engine.graphs.device import GraphDevice


@dataclass(slots=True)
class PinnedBuffer:
    """data: uint8, page-locked.  event: behind the last copy that was queued from or to it."""

    data: Tensor
    event: Event

    def wait(self) -> None:
        """Until no copy uses it any more."""
        if not self.event.query():
            self.event.synchronize()


class PinnedRing:
    """Letters to the device, taken in turn: with one more than steps in flight, ``take`` waits for nothing."""

    def __init__(self, device: GraphDevice, num_buffers: int, num_bytes: int) -> None:
        self._buffers = [PinnedBuffer(device.host(num_bytes), device.event()) for _ in range(num_buffers)]
        self._next = 0

    def take(self) -> PinnedBuffer:
        """The one that was taken the longest ago.  Record its event behind the copy."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer


class PinnedReceiver:
    """Letters from the device: each is somebody's until its content is dropped, however many there are."""

    def __init__(self, device: GraphDevice, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._free: list[PinnedBuffer] = []

    def receive(self, source: Tensor) -> tuple[Tensor, Event]:
        """Queue a copy of ``source``, one dimension; it can be read once the event is reached."""
        if self._free:
            buffer = self._free.pop()
            buffer.wait()
        else:
            buffer = PinnedBuffer(self._device.host(self._num_bytes), self._device.event())
        content = buffer.data[: source.nbytes].view(source.dtype)
        weakref.finalize(content, self._free.append, buffer).atexit = False
        self._device.copy(content, source)
        buffer.event.record()
        return content, buffer.event
