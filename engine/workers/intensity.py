"""How often something may be restarted before that stops being a cure.

Owns: when it was.  Does not know: what was restarted, clocks.
"""

from collections import deque

from engine.errors import EngineDied


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
