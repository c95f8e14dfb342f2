"""What the host tells the device between decode steps, and what it gets back, in page-locked memory.

Owns: when such memory may be written again.  Does not know: what is in it.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor

from engine.graphs.device import Event, GraphDevice


@dataclass(slots=True)
class Letter:
    """data: uint8, page-locked.  event: behind the last copy that was queued from or to it."""

    data: Tensor
    event: Event

    def wait(self) -> None:
        """Until no copy uses it any more."""
        if not self.event.query():
            self.event.synchronize()


class Outbox:
    """Letters to the device, taken in turn: with one more than steps in flight, ``take`` waits for nothing."""

    def __init__(self, device: GraphDevice, num_letters: int, num_bytes: int) -> None:
        self._letters = [Letter(device.host(num_bytes), device.event()) for _ in range(num_letters)]
        self._next = 0

    def take(self) -> Letter:
        """The one that was taken the longest ago.  Record its event behind the copy."""
        letter = self._letters[self._next]
        self._next = (self._next + 1) % len(self._letters)
        letter.wait()
        return letter


class Inbox:
    """Letters from the device: each is somebody's until its content is dropped, however many there are."""

    def __init__(self, device: GraphDevice, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._free: list[Letter] = []

    def receive(self, source: Tensor) -> tuple[Tensor, Event]:
        """Queue a copy of ``source``, one dimension; it can be read once the event is reached."""
        if self._free:
            letter = self._free.pop()
            letter.wait()
        else:
            letter = Letter(self._device.host(self._num_bytes), self._device.event())
        content = letter.data[: source.nbytes].view(source.dtype)
        weakref.finalize(content, self._free.append, letter).atexit = False
        self._device.copy(content, source)
        letter.event.record()
        return content, letter.event
