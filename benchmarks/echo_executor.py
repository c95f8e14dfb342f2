"""An executor process whose device only takes time: what a step takes beyond that is the way there and back.

The model's name in the configuration is the device's time for a step, in milliseconds.
"""

import time
from dataclasses import dataclass

from engine.actors.runner import Runner
from engine.messages import Step, StepDone
from engine.workers.executor_main import main
from engine.workers.messages import ExecutorAssignment


@dataclass(slots=True)
class Pending:
    """A step that is done at a certain time, with as many tokens as it has decode rows."""

    step: Step
    done_at: float

    def ready(self) -> bool:
        """Whether that time has come."""
        return time.perf_counter() >= self.done_at

    def collect(self) -> StepDone:
        """The rows as tokens."""
        if (left_s := self.done_at - time.perf_counter()) > 0:
            time.sleep(left_s)
        return StepDone(rank=0, step_id=self.step.step_id, token_ids=self.step.decode_rows)


class EchoRunner(Runner):
    """Steps run one after the other, ``step_s`` each, as on a device with a queue."""

    num_pages = 1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_at = 0.0

    def launch(self, step: Step) -> Pending:
        """Queue a step."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        return Pending(step, self._free_at)

    def leave(self) -> None:
        """There are no other ranks."""


def load(assignment: ExecutorAssignment) -> EchoRunner:
    """Nothing is loaded."""
    return EchoRunner(float(assignment.config.model.name) / 1e3)


if __name__ == "__main__":
    main(load)
