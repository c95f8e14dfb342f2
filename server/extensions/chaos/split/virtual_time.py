"""Virtual time without an event loop: calls that are due, in order.

Owns: the time, the order of calls.  Does not know: what they do.
"""

import heapq
import itertools
from collections.abc import Callable

from server.extensions.chaos.sim.failures import SimStuck


class DueCall:
    """A call that is due.  call: None once it was cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualTime:
    """The calls of a run.  time: of now, in seconds."""

    def __init__(self) -> None:
        self.time = 0.0
        self._queue: list[tuple[float, int, DueCall]] = []
        self._numbers = itertools.count()
        self._last: dict[tuple[object, ...], float] = {}

    def now(self) -> float:
        """Return the time."""
        return self.time

    def after(self, seconds: float, call: Callable[[], None], in_order: tuple[object, ...] | None = None) -> DueCall:
        """Call later.  in_order: calls with the same one keep their order."""
        at = self.time + seconds
        if in_order is not None:
            at = self._last[in_order] = max(at, self._last.get(in_order, 0.0))
        due = DueCall(call)
        heapq.heappush(self._queue, (at, next(self._numbers), due))
        return due

    def play_until(self, is_over: Callable[[], bool], most_s: float, what: str) -> None:
        """Make the calls until something holds.  Raises SimStuck if it takes longer than to a time."""
        while not is_over():
            if not self._queue:
                raise SimStuck(f"nothing happens any more, while waiting for {what}")
            at, _, due = heapq.heappop(self._queue)
            if at > most_s:
                raise SimStuck(f"waited until {most_s:g} s for {what}")
            if due.call is not None:
                self.time = at
                due.call()

    def rest(self, seconds: float) -> None:
        """Make the calls of so many seconds."""
        self.after(seconds, lambda: None)
        until = self.time + seconds
        self.play_until(lambda: self.time >= until, until, "rest")
