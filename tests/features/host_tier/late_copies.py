"""A stream of copies on a CPU, where each is made as late as it may be: when the model waits for it or a later one.

What forgets to wait reads what was there before; what overwrites a source too early sends the wrong bytes.
"""

from collections.abc import Callable


class LateCopies:
    """See ``CopyStream``.  num_waits: how often something was still to be made when it was waited for."""

    overlaps = True

    def __init__(self) -> None:
        self._queued: list[Callable[[], None]] = []
        self._num_made = 0
        self.num_waits = 0

    def queue(self, copy: Callable[[], None]) -> int:
        self._queued.append(copy)
        return len(self._queued)

    def wait(self, mark: int | None) -> None:
        self.num_waits += (mark or 0) > self._num_made
        while self._num_made < (mark or 0):
            self._queued[self._num_made]()
            self._num_made += 1

    def finish(self) -> None:
        """As if the device had been waited for."""
        self.wait(len(self._queued))
