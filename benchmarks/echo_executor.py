"""An executor process whose device only takes time: what a step takes beyond that is the way there and back.

The model's name in the configuration is the device's time for a step, in milliseconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.actors.runner import Runner
from engine.messages import Step, StepDone
from engine.workers.executor_main import main
from engine.workers.messages import ExecutorAssignment


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that is done at a certain time."""

    result: StepDone
    done_at: float

    def ready(self) -> bool:
        """Return whether that time has come."""
        return time.perf_counter() >= self.done_at

    def collect(self) -> StepDone:
        """Wait for that time, and return the result."""
        if (left_s := self.done_at - time.perf_counter()) > 0:
            time.sleep(left_s)
        return self.result


class TimedRunner(Runner):
    """A device that computes nothing and takes its time: steps queue behind each other, and the host waits for none.

    answer: returns the result of a step.  seconds: how long it takes."""

    def __init__(self, num_pages: int, answer: Callable[[Step], StepDone], seconds: Callable[[Step], float]) -> None:
        self.num_pages = num_pages
        self._answer = answer
        self._seconds = seconds
        self._free_at = 0.0

    def launch(self, step: Step) -> Pending:
        """Queue a step."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds(step)
        return Pending(self._answer(step), self._free_at)


class EchoRunner(TimedRunner):
    """A device whose steps take ``step_s`` each; their tokens are the numbers of the rows that decode."""

    def __init__(self, step_s: float) -> None:
        super().__init__(1, self._echo, lambda step: step_s)

    @staticmethod
    def _echo(step: Step) -> StepDone:
        return StepDone(rank=0, step_id=step.step_id, token_ids=step.decode_rows)


def load(assignment: ExecutorAssignment) -> EchoRunner:
    """Return a runner at once."""
    return EchoRunner(float(assignment.config.model.name) / 1e3)


if __name__ == "__main__":
    main(load)
