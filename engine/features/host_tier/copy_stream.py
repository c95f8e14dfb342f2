"""Where copies between the tiers are queued: beside the model's work, and how each side waits for the other.

Owns: the stream and its events.  Does not know: pages, layers, which copies there are.
``tests/features/host_tier/late_copies.py`` is the same seam on a CPU: it makes a copy only when somebody waits for it.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Mark = torch.cuda.Event | None  # None where a copy is made at once


class CopyStream(Protocol):
    """The host waits for nothing here.

    overlaps: whether copies run beside the model's work; if not, each is made when it is queued."""

    overlaps: bool

    def queue(self, copy: Callable[[], None]) -> Mark:
        """Make a copy behind all that were queued before, and behind what the model's stream has to do by now."""
        ...

    def wait(self, mark: Mark) -> None:
        """What the model's stream is given from now on comes behind the copy that ``queue`` gave this mark for."""
        ...


class CudaCopies:
    """See ``CopyStream``.  What a copy allocates belongs to its stream, so it is not given away while it is read."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def queue(self, copy: Callable[[], None]) -> Mark:
        """See ``CopyStream``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            mark = torch.cuda.Event()
            mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        if mark is not None:
            model = torch.cuda.current_stream(self._stream.device)
            model.wait_event(mark)


class DirectCopies:
    """See ``CopyStream``.  A CPU has no queue."""

    overlaps = False

    def queue(self, copy: Callable[[], None]) -> Mark:
        """See ``CopyStream``."""
        copy()
        return None

    def wait(self, mark: Mark) -> None:
        """See ``CopyStream``."""


def copies_on(device: torch.device) -> CopyStream:
    """What copies on a device."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
