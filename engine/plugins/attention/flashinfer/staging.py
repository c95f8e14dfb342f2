"""Page-locked memory that the host fills now and the device copies from later.

Owns: when a buffer may be rewritten.  Does not know: its contents.

A queued copy reads its source when the stream reaches it, perhaps two steps later.  Writing the buffer before that
gives a kernel the next step's plan, without any error.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class StagingEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """One buffer.  data: uint8, page-locked if there is a device to copy to."""

    def __init__(self, event: StagingEvent | None) -> None:
        self.data: Tensor = torch.empty(0, dtype=torch.uint8)
        self._event = event
        self._sent = False

    def sent(self) -> None:
        """Note that every copy that reads this buffer is queued on the current stream."""
        if self._event is not None:
            self._event.record()
            self._sent = True

    def wait(self) -> None:
        """Wait until the copies have run; return at once if there are none."""
        if self._event is not None and self._sent:
            self._event.synchronize()
            self._sent = False


class StagingRing:
    """Buffers that are used in turn: with one more than can be queued at a time, ``take`` never waits."""

    def __init__(
        self, num_buffers: int, device: torch.device, new_event: Callable[[], StagingEvent] | None = None
    ) -> None:
        """Make the buffers.

        new_event: None for CUDA's own events, or for none on a CPU, where a copy has run when it returns."""
        if new_event is None and device.type == "cuda":
            new_event = torch.cuda.Event
        self._page_locked = device.type == "cuda"
        self._buffers = [Staging(new_event() if new_event else None) for _ in range(num_buffers)]
        self._next = 0

    def take(self, num_bytes: int) -> Staging:
        """Return a buffer of at least this size that is no longer read.  Call its ``sent`` after filling it."""
        staging = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        staging.wait()
        if len(staging.data) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            staging.data = torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)
        return staging
