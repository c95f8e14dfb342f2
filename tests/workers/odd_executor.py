"""An executor process with a device that misbehaves as the step's id says."""

import os
import sys

from benchmarks.echo_executor import Pending
from engine.actors.runner import Runner
from engine.actors.step_splitting import StepSplitter
from engine.messages import Step, StepDone
from engine.types.errors import WeightsError
from engine.workers.executor_main import main
from engine.workers.messages import ExecutorAssignment

OVERSIZED, EXITS, RAISES, FINE, LARGE = range(5)
MOST_ROWS = 3  # that there is room for


class OddRunner(Runner):
    num_pages = 5

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def launch(self, step: Step) -> Pending:
        if step.step_id == EXITS:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if step.step_id == RAISES:
            raise WeightsError("the weights have changed under us")
        if step.step_id == LARGE and len(step.decode_rows) > 4 * MOST_ROWS:
            raise MemoryError("no room")
        size = 65 << 20 if step.step_id == OVERSIZED else 4
        return Pending(StepDone(rank=self.rank, step_id=step.step_id, token_ids=bytes(size)), 0.0)

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
