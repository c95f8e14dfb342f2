"""The amount of work in a step, in numbers that its duration depends on.

Owns: those numbers, and each row's length, which a step does not have.  Does not know: planning, durations.
"""

from typing import Final, NamedTuple

import numpy as np

from engine.messages import Step


class StepSize(NamedTuple):
    """The amount of work in one step.

    decodes: rows that decode.  context: tokens whose keys they read.
    prefills: prompts that compute some tokens.  prefill_tokens: number of these tokens.
    pairs: queries times keys in prompts.  copies: pages moved between device and host."""

    decodes: int
    context: int
    prefills: int
    prefill_tokens: int
    pairs: int
    copies: int


NOTHING: Final = StepSize(0, 0, 0, 0, 0, 0)


class StepSizes:
    """A measure of steps.  It must see every step of an engine, in the order in which they are planned."""

    def __init__(self, max_running: int) -> None:
        self._lengths = np.zeros(max_running, dtype=np.int64)  # tokens of a row, including the one being sampled

    @property
    def num_rows(self) -> int:
        """Number of rows that a step may have."""
        return len(self._lengths)

    def measure(self, step: Step) -> StepSize:
        """Return the work of a step, and count its tokens as computed."""
        decodes = np.frombuffer(step.decode_rows, dtype=np.int32)
        rows, starts, lengths, samples = (
            np.frombuffer(column, dtype=np.int32)
            for column in (step.prefill_rows, step.prefill_starts, step.prefill_lengths, step.prefill_samples)
        )
        context = int(self._lengths[decodes].sum())
        self._lengths[decodes] += 1
        self._lengths[rows] = starts + lengths + (samples > 0)
        pairs = int((lengths.astype(np.int64) * starts + lengths.astype(np.int64) * (lengths + 1) // 2).sum())
        return StepSize(len(decodes), context, len(rows), int(lengths.sum()), pairs, step.num_copied)
