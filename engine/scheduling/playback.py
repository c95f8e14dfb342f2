"""A planner that is played without a device: in virtual time, with tokens that are known beforehand.

Owns: virtual time, when each step in flight is done, the tokens that a step samples.
Does not know: which requests there are, how long a step takes, what becomes of the tokens.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from engine.messages import Admission, Step, StepDone
from engine.scheduling.planner import Planner

Int32 = npt.NDArray[np.int32]


class Playback:
    """A planner, and a device that runs one step after the other.  planner: its clock is ``now``, in virtual seconds.

    script: returns the tokens of an admitted sequence by position; EOS follows them.  A row samples one token in a
    step.  seconds: how long a step takes.  depth: most steps in flight."""

    def __init__(
        self,
        new_planner: Callable[[Callable[[], float]], Planner],
        script: Callable[[Admission], Int32],
        seconds: Callable[[Step], float],
        *,
        depth: int,
        now: float = 0.0,
    ) -> None:
        self.now = self._free_at = now
        self.planner = new_planner(lambda: self.now)
        self._script = script
        self._seconds = seconds
        self._depth = depth
        limits = self.planner.requests.limits
        self._eos = limits.eos_token_ids[0]
        self._tokens = np.full((limits.max_running, limits.max_len + 1), self._eos, dtype=np.int32)
        self._known = np.zeros(limits.max_running, dtype=np.int64)
        self._in_flight: deque[tuple[float, StepDone]] = deque()

    def times(self, arrive: Callable[[], float]) -> Iterator[float]:
        """Yield the time of what happens next, to be passed to ``advance``, until nothing happens any more.

        arrive: admits the requests that are there by ``now``, and returns when there is something again."""
        while True:
            next_at = arrive()
            while self.planner.num_in_flight < self._depth and (step := self.planner.next_step()) is not None:
                self._free_at = max(self._free_at, self.now) + self._seconds(step)
                self._in_flight.append((self._free_at, self._answer(step)))
            next_at = min(next_at, self._in_flight[0][0] if self._in_flight else math.inf)
            if next_at == math.inf:
                return
            yield next_at

    def advance(self, to: float) -> bool:
        """Let time pass, and complete the oldest step if it is done by then; return whether it was."""
        self.now = max(self.now, to)
        is_done = bool(self._in_flight) and self._in_flight[0][0] <= to
        if is_done:
            self.planner.complete(self._in_flight.popleft()[1])
        return is_done

    def _answer(self, step: Step) -> StepDone:
        for admission in step.admissions:
            line, script = self._tokens[admission.row], self._script(admission)
            line[:] = self._eos
            line[: len(script)] = script[: len(line)]
            self._known[admission.row] = len(admission.token_ids) // line.itemsize
        columns = (step.decode_rows, step.prefill_rows, step.prefill_samples)
        decodes, prefills, samples = (np.frombuffer(column, dtype=np.int32) for column in columns)
        rows = np.concatenate((decodes, prefills[samples == 1]))
        sampled = self._tokens[rows, self._known[rows]]
        self._known[rows] += 1
        return StepDone(rank=0, step_id=step.step_id, token_ids=sampled.tobytes())
