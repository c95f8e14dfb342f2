"""Page-locked buffers for copies between host and device around decode steps.

Owns: when such memory may be written again.  Does not know: its content.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

from engine.execution.captured_steps import StepEvent
from engine.graphs.device import GraphDevice


@dataclass(slots=True)
class PinnedBuffer:
    """A page-locked buffer.  data: uint8.  event: recorded after the last copy that was queued from or to it."""

    data: Tensor
    event: StepEvent

    def wait(self) -> None:
        """Wait until no copy uses the buffer."""
        if not self.event.query():
            self.event.synchronize()


class PinnedRing:
    """Buffers for copies to the device, used in turn: with more buffers than steps in flight, ``take`` never waits."""

    def __init__(self, device: GraphDevice, num_buffers: int, num_bytes: int) -> None:
        self._buffers = [PinnedBuffer(device.host(num_bytes), device.event()) for _ in range(num_buffers)]
        self._next = 0

    def take(self) -> PinnedBuffer:
        """Return the least recently taken buffer.  The caller must record its event after the copy."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer


class PinnedReceiver:
    """Buffers for copies from the device: one is in use until the returned tensor is freed; more are made as needed."""

    def __init__(self, device: GraphDevice, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._free: list[PinnedBuffer] = []

    def receive(self, source: Tensor) -> tuple[Tensor, StepEvent]:
        """Queue a copy of a one-dimensional ``source``; the result can be read once the event is reached."""
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
