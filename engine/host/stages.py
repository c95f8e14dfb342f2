"""The stages of a start: which one runs, how far it is, and the seconds of each at the end.

Owns: names and times.  Does not know: what a stage does.  A thread that loads writes it, and others read ``now``.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

IMPORTS = "imports"


class Stages:
    """The stages so far.  now: the running one, with its share if that is known; '' before the first and at the end."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = ""
        self._clock = clock
        self._what = ""
        self._began = clock()
        self._seconds: dict[str, float] = {}

    def of_process(self) -> "Stages":
        """Count the process's life until now as its imports, if it is known; return the stages."""
        with suppress(OSError, ValueError, IndexError):
            # The 22nd field is the start in ticks since the machine's; the name before it may have spaces.
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            started = ticks / os.sysconf("SC_CLK_TCK")
            self._seconds[IMPORTS] = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
        return self

    def begin(self, what: str) -> None:
        """Begin a stage, and end the one before it.  what: '' ends the last one."""
        now = self._clock()
        if self._what:
            self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._began
        self.now, self._what, self._began = what, what, now

    def share(self, done: float) -> None:
        """Note how much of the stage is done, from 0 to 1."""
        self.now = f"{self._what}, {done:.0%}"

    @property
    def total_s(self) -> float:
        """The seconds of all stages that have ended."""
        return sum(self._seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.2f}" for what, seconds in self._seconds.items())
