"""An executor process whose device needs no torch: it is there in no time, and a step costs nothing.

Owns: that device.  Does not know: models, how an engine is started.
A token is a checksum of all that come before it in its row, so a stream that is taken up at the wrong place differs.
"""

import time
from zlib import crc32

import numpy as np

from engine.actors.runner import Runner
from engine.config import Config
from engine.messages import Step, StepDone
from engine.workers.executor_main import main

STEP_S = 0.004  # asleep, about as long as the demo model's steps take
# Tokens of the demo model that are whole characters each; the models of tests have them too.
FIRST_TOKEN, NUM_TOKENS = 40, 50
MOST_TOKENS = 1 << 18  # no model of the tests has as many


class Result:
    def __init__(self, done: StepDone) -> None:
        self._done = done

    def ready(self) -> bool:
        return True

    def collect(self) -> StepDone:
        return self._done


class QuickRunner(Runner):
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._sums: dict[int, int] = {}

    def launch(self, step: Step) -> Result:
        """See ``Runner``."""
        time.sleep(STEP_S)
        for admission in step.admissions:
            if (last := np.frombuffer(admission.token_ids, dtype=np.int32).max()) >= MOST_TOKENS:
                raise IndexError(f"there is no token {last}")
            self._sums[admission.row] = crc32(admission.token_ids)
        decoded, prefilled, samples = (
            np.frombuffer(column, dtype=np.int32)
            for column in (step.decode_rows, step.prefill_rows, step.prefill_samples)
        )
        tokens = [self._sample(row) for row in (*decoded.tolist(), *prefilled[samples > 0].tolist())]
        return Result(StepDone(rank=0, step_id=step.step_id, token_ids=np.array(tokens, dtype=np.int32).tobytes()))

    def leave(self) -> None:
        """There are no other ranks."""

    def _sample(self, row: int) -> int:
        token = FIRST_TOKEN + self._sums[row] % NUM_TOKENS
        self._sums[row] = crc32(token.to_bytes(4, "little"), self._sums[row])
        return token


def quick_runner(config: Config, num_pages: int) -> Runner:
    """num_pages: of the pool, once the engine knows, or 0."""
    return QuickRunner(num_pages or config.kv.num_pages)


if __name__ == "__main__":
    main(lambda assignment: quick_runner(assignment.config, assignment.num_pages))
