"""The number of CPU threads of a model's steps, measured with decode steps of its own once it is loaded.

Owns: the measurement.  The result is kept for later starts, which take it at once; its first steps check it.
Does not know: what a step computes, what is done when the machine changes (``engine/execution/step_threads.py``).
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from engine.execution.step_threads import HOPELESS, SHORT_S, fastest
from engine.host.contest import Contest
from engine.host.kept_results import KeptResults
from engine.layers.comm import Comm

log = logging.getLogger(__name__)

ROWS = (1, 8)
TURNS = 5
LIMIT_S = 0.8  # no turn begins later; one is made in any case


def common_choices(choices: Sequence[int], comm: Comm) -> Sequence[int]:
    """Return the choices if every rank has the same ones, else none: ranks measure together or not at all.

    Machines differ in their cores, and in OMP_NUM_THREADS.  All ranks call it together."""
    if comm.size == 1:
        return choices
    most = max(choices, default=0)  # it determines all of them
    everyones = comm.all_gather(torch.tensor([most], dtype=torch.float64), 0)
    if bool((everyones == most).all()):
        return choices
    log.info("threads: %d (not measured: ranks have different choices)", torch.get_num_threads())
    return ()


class ThreadRace:
    """A race of numbers of threads.  All ranks run it together: steps need all of them, with the same numbers.

    step: runs a decode step of so many rows.  kept: the fastest number, kept by an earlier start of one rank alone.
    is_measured: whether this start has measured the number that ``run`` returned."""

    def __init__(
        self,
        comm: Comm,
        step: Callable[[int], None],
        *,
        kept: KeptResults[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._comm = comm
        self._step = step
        self._kept = kept if comm.size == 1 else None
        self._clock = clock
        self._set_threads = set_threads
        self.is_measured = False

    def run(self, choices: Sequence[int]) -> int:
        """Set the fastest number of threads: an earlier start's, or else by measurements, whose times are logged."""
        known = self._kept.load() if self._kept is not None else None
        self.is_measured = known is None or known not in choices
        if known is None or self.is_measured:
            chosen = self._chosen(choices)
            if self._kept is not None:
                self._kept.keep(chosen)
        else:
            chosen = known
            log.info("threads: %d (measured by an earlier start; the first steps check it)", chosen)
        self._set_threads(chosen)
        return chosen

    def _chosen(self, choices: Sequence[int]) -> int:
        """Measure, log the times, and return the fastest number of threads."""
        began = self._clock()
        contest = Contest(
            self._seconds,
            ROWS,
            turns=TURNS,
            middle=statistics.median,
            hopeless=HOPELESS,
            is_over=lambda: self._largest(self._clock() - began) > LIMIT_S,
        )
        # Most threads first: if a few are slow, fewer are not even tried.
        times = contest.run(sorted(choices, reverse=True))
        means = {threads: statistics.geometric_mean(of_rows) for threads, of_rows in times.items()}
        # The event loop's work between steps takes about as long as such a step, so one core is left to it: threads
        # would wait for the thread that the event loop has displaced.
        short = len(means) > 1 and min(means.values()) < SHORT_S
        if short:
            means.pop(max(choices), None)
        chosen = fastest(means)
        table = "; ".join(f"{threads}: {', '.join(f'{1e3 * one:.2f}' for one in times[threads])}" for threads in times)
        rows, left = " and ".join(map(str, ROWS)), "; so short that one core is left to the event loop" if short else ""
        log.info("threads: %d (measured, ms of steps of %s rows: %s%s)", chosen, rows, table, left)
        return chosen

    def _seconds(self, threads: int, rows: int) -> float:
        """Time the slowest rank's step, after another of its kind: threads are awake and products compiled by then."""
        self._set_threads(threads)
        self._step(rows)
        start = self._clock()
        self._step(rows)
        return self._largest(self._clock() - start)

    def _largest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        if self._comm.size == 1:
            return value
        return float(self._comm.all_gather(torch.tensor([value], dtype=torch.float64), 0).max())
