"""A device that runs what is queued later, as a GPU does, so that a buffer that is overwritten too early shows.

Owns: a stream of queued work, events on it, copies whose source is read when they run.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class FakeStream:
    """num_waits: how often the host had to stand still until queued work had run."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._num_done = 0
        self.num_waits = 0

    def queue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def upload(self, source: Tensor) -> Tensor:
        """A tensor on the device that will have what ``source`` has when the stream gets there."""
        target = source.new_full(source.shape, -7)
        self.queue(lambda: target.copy_(source))
        return target

    def mark(self) -> int:
        """A position: behind everything that has been queued so far."""
        return len(self._work)

    def run(self, until: int | None = None) -> None:
        end = len(self._work) if until is None else until
        with torch.inference_mode():
            for work in self._work[self._num_done : end]:
                work()
        self._num_done = max(self._num_done, end)

    def event(self) -> "FakeEvent":
        return FakeEvent(self)

    def wait(self, mark: int) -> None:
        self.num_waits += mark > self._num_done
        self.run(mark)


class FakeEvent:
    """``torch.cuda.Event`` on a fake stream."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._mark = 0

    def record(self) -> None:
        self._mark = self._stream.mark()

    def synchronize(self) -> None:
        self._stream.wait(self._mark)
