"""How long a group waits for its workers, and how often it starts them anew.

Owns: those numbers, and when restarts were.  Does not know: clocks, workers, what to do about them.
"""

from collections import deque
from dataclasses import dataclass

from engine.types.errors import EngineDied


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
