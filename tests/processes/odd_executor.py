"""An executor process with a device that misbehaves as the step's id says."""

import os
import sys
from dataclasses import dataclass

from engine.errors import WeightsError
from engine.messages import Step, StepDone
from engine.processes.assignment import Assignment
from engine.processes.executor import main

OVERSIZED, EXITS, RAISES, FINE = range(4)


@dataclass(slots=True)
class Result:
    step: Step

    def ready(self) -> bool:
        return True

    def collect(self) -> StepDone:
        size = 65 << 20 if self.step.step_id == OVERSIZED else 4
        return StepDone(rank=0, step_id=self.step.step_id, token_ids=bytes(size))


class OddRunner:
    num_pages = 5

    def launch(self, step: Step) -> Result:
        if step.step_id == EXITS:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if step.step_id == RAISES:
            raise WeightsError("the weights have changed under us")
        return Result(step)

    def leave(self) -> None:
        pass


def load(assignment: Assignment) -> OddRunner:
    if assignment.config.model.name == "no such thing":
        raise KeyError("embed_tokens")
    return OddRunner()


if __name__ == "__main__":
    main(load)
