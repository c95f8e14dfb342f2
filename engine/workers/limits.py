"""Limits of a group: how long it waits for its workers, and how often it restarts them.

Owns: these numbers, and the times of restarts.  Does not know: clocks, workers, the reaction to a limit.
"""

from collections import deque
from dataclasses import dataclass

from engine.types.errors import EngineDied


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts of a group for its workers, in seconds; 0 for no limit.

    silence_s: time without a message of a loaded worker.  step_s: time for a step.
    first_load_s: time for the first generation to load; later ones get a multiple of the time that this took.
    join_s: time until the first message of workers that start by themselves."""

    silence_s: float = 0.0
    step_s: float = 0.0
    first_load_s: float = 0.0
    join_s: float = 0.0


class RestartIntensity:
    """A limit of ``max_restarts`` restarts within any ``window_s`` seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._times: deque[float] = deque()

    def spend(self, reason: str, now: float) -> None:
        """Count a restart.  Raises EngineDied with the reason if it exceeds the limit.  Arguments as in ``allows``."""
        if not self.allows(now):
            times = f"{self.max_restarts} restarts in {self.window_s:g} s did not help"
            raise EngineDied(f"{reason}; {times if self.max_restarts else 'placement.max_restarts is 0'}")

    def forgive(self, count: int) -> None:
        """Forget the last ``count`` restarts, whose cause is gone."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    def allows(self, now: float) -> bool:
        """Whether one more restart is allowed, which is then counted.  now: seconds, never decreasing."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return False
        self._times.append(now)
        return True
