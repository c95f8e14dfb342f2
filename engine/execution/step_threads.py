"""The number of CPU threads of decode steps, chosen again when the machine is no longer what it was at the start.

Owns: the usual time of steps of each shape, and trials of other numbers of threads on steps that run anyway.
Does not know: what a step computes, how the first number was chosen (``engine/startup/thread_race.py``).

Threads wait for each other in every operation, so if another program takes a core, a step with two threads can take
twenty times as long as with one.  No step is run for a trial: the next few steps try each number in turn.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.execution.features import RankFeature
from engine.execution.launched_step import LaunchedStep
from engine.execution.rows import DeviceRows
from engine.messages import Step

log = logging.getLogger(__name__)

# Steps are alike if they have as many rows, and attend to about as many tokens: (rows, bits of the number of tokens).
Shape = tuple[int, int]
CLEARLY = 0.95  # share of the time with fewer threads: more threads must do better than that
HOPELESS = 2.0  # times as long as the best so far: not tried any longer
WINDOW = 16  # steps whose median counts
SLOW = 2.0  # times as long as usual
SLOW_FOR_S = 2.0
TRIED = 8  # steps of the trial's shape with each number
TRYING = "ran while other numbers of threads were tried"
LONGEST_TRIAL = 256  # steps of any shape
SHORT_S = 1e-3  # a step that is as long as the event loop's work: one core is left to that
PAUSE_S, LONGEST_PAUSE_S = 30.0, 960.0


def fastest(seconds: Mapping[int, float]) -> int:
    """Return the fewest threads that no greater number beats clearly.  seconds: by number of threads."""
    best = min(seconds)
    for threads in sorted(seconds):
        if seconds[threads] < CLEARLY * seconds[best]:
            best = threads
    return best


class StepThreads:
    """A choice of the number of threads by the times of decode steps.  It is called between steps, on their thread.

    choices: numbers that may be taken.  chosen: the number in force, at first that of the start.
    is_measured: whether this start has measured it; else the first steps that are alike try the others as well.
    """

    def __init__(
        self,
        choices: Sequence[int],
        chosen: int,
        *,
        is_measured: bool = True,
        clock: Callable[[], float] = time.monotonic,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.chosen = chosen
        self._is_measured = is_measured
        self._choices = choices
        self._at_start = chosen
        self._clock = clock
        self._set_threads = set_threads
        self._recent: dict[Shape, list[float]] = {}
        self._usual: dict[Shape, float] = {}
        self._slow_since: float | None = None
        self._trial: Trial | None = None
        self._not_before = clock()
        self._upwards_after = clock() + PAUSE_S
        self._pause_s = PAUSE_S

    @property
    def are_tried(self) -> bool:
        """Whether steps run with other numbers of threads than the chosen one."""
        return self._trial is not None

    def took(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Note the time of a step.  num_tokens: the tokens of all contexts together."""
        shape = (num_rows, num_tokens.bit_length())
        if self._trial is not None:
            self._go_on(self._trial, shape, seconds)
        elif self._should_try(shape, seconds):
            others = [threads for threads in self._offered(self._usual[shape]) if threads != self.chosen]
            self._trial = Trial(shape, [self.chosen, *others]) if others else None

    def _offered(self, step_s: float) -> Sequence[int]:
        """The numbers that suit steps of such a time.  Short ones leave a core to the event loop, as at the start."""
        return [threads for threads in self._choices if step_s >= SHORT_S or threads < max(self._choices)]

    def _should_try(self, shape: Shape, seconds: float) -> bool:
        """Return whether an earlier start measured the number, steps have been slow for long, or another was taken long
        ago: than the start's, or than the greatest, since a neighbour that was busy then may be gone."""
        times = self._recent.setdefault(shape, [])
        times.append(seconds)
        if len(times) < WINDOW:
            return False
        median = statistics.median(times)
        self._recent.clear()  # also other shapes', so that shapes that no longer come take no room
        usual = self._usual[shape] = min(median, self._usual.get(shape, median))
        if not self._is_measured:
            self._is_measured = True
            return True
        now = self._clock()
        if median < SLOW * usual:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now
        slow = self._slow_since is not None and now - self._slow_since >= SLOW_FOR_S
        upwards = now >= self._upwards_after and self.chosen < max(self._choices) and median >= SHORT_S
        return now >= self._not_before and (slow or upwards or self.chosen != self._at_start)

    def _go_on(self, trial: "Trial", shape: Shape, seconds: float) -> None:
        if trial.take(shape, seconds):
            self._set_threads(trial.threads)
            return
        before, self._trial = self.chosen, None
        if trial.complete:
            medians = trial.medians()
            offered = self._offered(min(medians.values()))
            self.chosen = fastest({threads: medians[threads] for threads in medians if threads in offered} or medians)
            self._usual = {trial.shape: medians[self.chosen]}
        self._set_threads(self.chosen)
        changed = self.chosen != before
        self._pause_s = PAUSE_S if changed else min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._not_before = self._clock() + self._pause_s
        self._slow_since = None
        log.info(
            "threads: %s%d, %s after steps of %d rows took, in ms, %s",
            f"from {before} to " if changed else "still ",
            self.chosen,
            "tried again" if trial.complete else "a trial was given up",
            trial.shape[0],
            trial,
        )


class TimedSteps(RankFeature):
    """A feature that times decode steps for ``StepThreads``.  rows: the runner's."""

    order = 100  # the time of other features in a step does not count

    def __init__(self, rows: DeviceRows, threads: StepThreads) -> None:
        self._rows = rows
        self._threads = threads
        self._start = 0.0

    def apply(self, step: Step) -> Step:
        """Note the begin of a step."""
        self._start = time.perf_counter()
        return step

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Note the time of a step: on a CPU it is done when it is launched."""
        if not step.prefill_rows:
            seconds = time.perf_counter() - self._start
            launched.note = TRYING if self._threads.are_tried else ""
            num_tokens = int(self._rows.computed[launched.rows_N].sum())
            self._threads.took(len(launched.rows_N), num_tokens, seconds)


class Trial:
    """A trial of numbers of threads, in turn, on steps of about one shape.  order: the number in force comes first."""

    def __init__(self, shape: Shape, order: Sequence[int]) -> None:
        self.shape = shape
        self._left = list(order)
        self._times: dict[int, list[float]] = {threads: [] for threads in order}
        self._num_steps = 0

    @property
    def threads(self) -> int:
        """The number of threads for the next step."""
        return self._left[0]

    @property
    def complete(self) -> bool:
        """Whether every number was tried."""
        return not self._left

    def take(self, shape: Shape, seconds: float) -> bool:
        """Note a step with ``threads``.  Return whether the trial goes on."""
        self._num_steps += 1
        # Contexts grow by a token each step; only short ones can double in so few steps.
        if shape[0] == self.shape[0] and abs(shape[1] - self.shape[1]) <= 1:
            times = self._times[self.threads]
            times.append(seconds)
            others = [statistics.median(found) for found in self._times.values() if found is not times and found]
            hopeless = len(times) > 1 and bool(others) and min(times) > HOPELESS * min(others)
            if hopeless or len(times) == TRIED:
                del self._left[0]
        return bool(self._left) and self._num_steps < LONGEST_TRIAL

    def medians(self) -> dict[int, float]:
        """Return number of threads -> median seconds of a step, of the numbers that were tried."""
        return {threads: statistics.median(times) for threads, times in self._times.items() if times}

    def __str__(self) -> str:
        return ", ".join(f"{1e3 * median:.2f} with {threads}" for threads, median in self.medians().items())
