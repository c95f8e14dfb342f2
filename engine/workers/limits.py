"""How long a group waits for its workers, and how often it starts them anew.

Owns: how long a worker has been quiet, when restarts were.  Does not know: clocks, workers, what to do about them.
Time is counted in ticks of a timer, not read from a clock: when this process itself stood still (a laptop asleep, a
busy machine) one tick passes, however long that took, so no worker is blamed.  And a step costs no look at a clock.
"""

from collections import deque
from dataclasses import dataclass

from engine.errors import EngineDied

TICKS = 8  # so many make a timeout


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a group waits for its workers, in seconds; 0 for ever.

    silence_s: for a word of one that has loaded.  step_s: for the answer to a step.  first_load_s: until the first
    generation has loaded; the next ones get some times as long as that took.  join_s: for the first word of workers
    that come by themselves."""

    silence_s: float = 0.0
    step_s: float = 0.0
    first_load_s: float = 0.0
    join_s: float = 0.0


class RestartIntensity:
    """At most ``max_restarts`` within any ``window_s`` seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times: deque[float] = deque()

    def spend(self, reason: str, now: float) -> None:
        """Take one.  Raises EngineDied, which says why and that this was one too many.  Arguments as in ``allows``."""
        if not self.allows(now):
            times = f"{self.max_restarts} restarts in {self.window_s:g} s did not help"
            raise EngineDied(f"{reason}; {times if self.max_restarts else 'placement.max_restarts is 0'}")

    def forgive(self, count: int) -> None:
        """What brought the last ``count`` is gone."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    def allows(self, now: float) -> bool:
        """Whether there may be one more, which is then counted.  now: seconds; never less than before."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return False
        self._times.append(now)
        return True


class Watch:
    """Whether a worker answers, and says anything.  step_ticks, silence_ticks: how many it may be quiet for; 0 for any
    number."""

    def __init__(self, step_ticks: int, silence_ticks: int) -> None:
        self._step_ticks = step_ticks
        self._silence_ticks = silence_ticks
        self._num_out = 0
        self._step_quiet = 0
        self._quiet = 0

    def sent(self) -> None:
        """A step is on its way to the worker."""
        if not self._num_out:
            self._step_quiet = 0
        self._num_out += 1

    def answered(self) -> None:
        """A step is done: the next one starts now, if there is one."""
        self._num_out -= 1
        self._step_quiet = 0

    def heard(self) -> None:
        """The worker is there."""
        self._quiet = 0

    def tick(self, patience: int = 1) -> str | None:
        """Time has passed.  Returns what the worker fails to do, once it has taken too long.

        patience: with its silence, so many times as much."""
        self._quiet += 1
        self._step_quiet += 1
        if self._num_out and 0 < self._step_ticks < self._step_quiet:
            return "does not finish its step"
        if 0 < patience * self._silence_ticks < self._quiet:
            return "has stopped answering"
        return None
