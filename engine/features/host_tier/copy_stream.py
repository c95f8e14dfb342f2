"""The stream of copies between the tiers, which runs next to the model's work, and how each waits for the other.

Owns: the stream and its events.  Does not know: pages, layers, which copies there are.
``tests/features/host_tier/late_copies.py`` replaces it on a CPU: it makes a copy only when something waits for it.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Mark = torch.cuda.Event | None  # None if a copy is made at once


class CopyStream(Protocol):
    """A queue of copies.  The host waits for none of them.

    overlaps: whether copies run next to the model's work; if not, each is made when it is queued."""

    overlaps: bool

    def queue(self, copy: Callable[[], None]) -> Mark:
        """Queue a copy after all copies before it and after all work that the model's stream has now."""
        ...

    def wait(self, mark: Mark) -> None:
        """Make the work that the model's stream gets from now on wait for the copy of this mark."""
        ...


class CudaCopies:
    """A stream of copies on a GPU.  A copy allocates memory on this stream, so the memory stays while it is read."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def queue(self, copy: Callable[[], None]) -> Mark:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            mark = torch.cuda.Event()
            mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            model = torch.cuda.current_stream(self._stream.device)
            model.wait_event(mark)


class DirectCopies:
    """Copies on a CPU, which has no queue."""

    overlaps = False

    def queue(self, copy: Callable[[], None]) -> Mark:
        """Make the copy."""
        copy()
        return None

    def wait(self, mark: Mark) -> None:
        """Return at once: the copy is made."""


def copies_on(device: torch.device) -> CopyStream:
    """Return the stream of copies of a device."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
