"""The watch over one rank: does it still answer, and does it still say anything?

Owns: how long it has been quiet, in ticks of a timer.  Does not know: clocks, steps, what to do about it.
Ticks, not seconds: when this process itself stood still (a laptop asleep, a busy machine) one tick passes, however long
that took, so nobody is blamed for it.  And a step costs no look at a clock.
"""

TICKS = 8  # so many make a timeout


class Watch:
    """step_ticks, silence_ticks: how many it may be quiet for; 0 for any number."""

    def __init__(self, step_ticks: int, silence_ticks: int) -> None:
        self._step_ticks = step_ticks
        self._silence_ticks = silence_ticks
        self._num_out = 0
        self._step_quiet = 0
        self._quiet = 0

    def sent(self) -> None:
        """A step is on its way to the rank."""
        if not self._num_out:
            self._step_quiet = 0
        self._num_out += 1

    def answered(self) -> None:
        """A step is done: the next one starts now, if there is one."""
        self._num_out -= 1
        self._step_quiet = 0
        self._quiet = 0

    def heard(self) -> None:
        """The rank is there."""
        self._quiet = 0

    def tick(self) -> str | None:
        """Time has passed.  Returns what the rank fails to do, once it has taken too long."""
        self._quiet += 1
        self._step_quiet += 1
        if self._num_out and 0 < self._step_ticks < self._step_quiet:
            return "does not finish its step"
        if 0 < self._silence_ticks < self._quiet:
            return "has stopped answering"
        return None
