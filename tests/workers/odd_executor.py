"""An executor process with a device that misbehaves as the step's id says."""

import os
import sys
from dataclasses import dataclass

from engine.actors.runner import Runner
from engine.actors.step_splitting import StepSplitter
from engine.messages import Step, StepDone
from engine.types.errors import WeightsError
from engine.workers.executor_main import main
from engine.workers.messages import ExecutorAssignment

OVERSIZED, EXITS, RAISES, FINE, LARGE = range(5)
MOST_ROWS = 3  # that there is room for


@dataclass(slots=True)
class Result:
    step: Step
    rank: int

    def ready(self) -> bool:
        return True

    def collect(self) -> StepDone:
        size = 65 << 20 if self.step.step_id == OVERSIZED else 4
        return StepDone(rank=self.rank, step_id=self.step.step_id, token_ids=bytes(size))


class OddRunner(Runner):
    num_pages = 5

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def launch(self, step: Step) -> Result:
        if step.step_id == EXITS:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if step.step_id == RAISES:
            raise WeightsError("the weights have changed under us")
        if step.step_id == LARGE and len(step.decode_rows) > 4 * MOST_ROWS:
            raise MemoryError("no room")
        return Result(step, self.rank)

    def leave(self) -> None:
        pass


def load(assignment: ExecutorAssignment) -> Runner:
    if assignment.config.model.name == "no such thing":
        raise KeyError("embed_tokens")
    runner = OddRunner(assignment.rank)
    alone = assignment.num_ranks == 1
    return runner if alone else StepSplitter(runner, alone=False, most_tokens=assignment.most_tokens)


if __name__ == "__main__":
    main(load)
