"""How many CPU threads a model's steps run with: measured with decode steps of its own, once it is loaded.

Owns: the measurement.  Nothing is kept for the next start: it takes under a second, and a neighbour who was busy then
may be gone.
Does not know: what a step computes, what is done when the machine changes (``engine/execution/step_threads.py``).
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from engine.execution.step_threads import HOPELESS, fastest
from engine.layers.comm import Comm

log = logging.getLogger(__name__)

ROWS = (1, 8)
TURNS = 5
LIMIT_S = 0.8  # no turn begins later; one is made in any case
# Of what lies between steps, the event loop's share takes about as long as such a step: it is left a core, as threads
# wait for one that the event loop has displaced.
SHORT_S = 1e-3
# Threads -> seconds of a step of each of ROWS, each the median of the turns.
Times = dict[int, list[float]]


def common_choices(choices: Sequence[int], comm: Comm) -> Sequence[int]:
    """The choices if every rank has the same ones, else none: steps need all ranks, so they measure together or not.

    Machines differ in their cores, and in OMP_NUM_THREADS.  Of all ranks together."""
    if comm.size == 1:
        return choices
    most = max(choices, default=0)  # by which all of them are given
    everyones = comm.all_gather(torch.tensor([most], dtype=torch.float64), 0)
    if bool((everyones == most).all()):
        return choices
    log.info("threads: %d (not measured: ranks have different choices)", torch.get_num_threads())
    return ()


class ThreadRace:
    """All ranks together: steps need all of them, and they must try the same numbers.

    step: runs a decode step of so many rows."""

    def __init__(
        self,
        comm: Comm,
        step: Callable[[int], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._comm = comm
        self._step = step
        self._clock = clock
        self._set_threads = set_threads

    def run(self, choices: Sequence[int]) -> int:
        """Measure, say so, and leave the threads at the fastest."""
        times = self._measure(choices)
        means = {threads: statistics.geometric_mean(of_rows) for threads, of_rows in times.items()}
        short = len(means) > 1 and min(means.values()) < SHORT_S
        if short:
            means.pop(max(choices), None)
        chosen = fastest(means)
        self._set_threads(chosen)
        table = "; ".join(f"{threads}: {', '.join(f'{1e3 * one:.2f}' for one in times[threads])}" for threads in times)
        rows, left = " and ".join(map(str, ROWS)), "; so short that the event loop is left a core" if short else ""
        log.info("threads: %d (measured, ms of steps of %s rows: %s%s)", chosen, rows, table, left)
        return chosen

    def _measure(self, choices: Sequence[int]) -> Times:
        """Most threads first: where few are slow they are not even tried, and where many are hopeless, once."""
        began = self._clock()
        left = sorted(choices, reverse=True)
        samples: dict[int, list[list[float]]] = {}
        times: Times = {}
        for turn in range(TURNS):
            for threads in left:
                self._set_threads(threads)
                found = [self._seconds(rows) for rows in ROWS]
                samples.setdefault(threads, []).append(found)
                times[threads] = [statistics.median(of_rows) for of_rows in zip(*samples[threads], strict=True)]
                if not turn and times[threads][0] > HOPELESS * min(of_rows[0] for of_rows in times.values()):
                    break  # fewer still would take longer still
            best = min(map(statistics.geometric_mean, times.values()))
            left = [one for one in times if statistics.geometric_mean(times[one]) <= HOPELESS * best]
            if self._told(self._clock() - began) > LIMIT_S or len(left) == 1:
                break
        return times

    def _seconds(self, rows: int) -> float:
        """Of the slowest rank, for a step behind another of its kind: threads are awake then, products compiled."""
        self._step(rows)
        start = self._clock()
        self._step(rows)
        return self._told(self._clock() - start)

    def _told(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self._comm.size == 1:
            return value
        return float(self._comm.all_gather(torch.tensor([value], dtype=torch.float64), 0).max())
