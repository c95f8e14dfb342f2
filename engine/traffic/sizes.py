"""What a step has to compute, in numbers that its duration depends on.

Owns: those numbers, and each row's length, which a step does not say.  Does not know: planning, durations.
"""

from typing import Final, NamedTuple

import numpy as np

from engine.messages import Step


class StepSize(NamedTuple):
    """decodes: rows that decode.  context: tokens whose keys they read.  prefills: prompts that compute some tokens,
    prefill_tokens of them in all.  pairs: queries times keys in them.  copies: pages moved between device and host."""

    decodes: int
    context: int
    prefills: int
    prefill_tokens: int
    pairs: int
    copies: int


NOTHING: Final = StepSize(0, 0, 0, 0, 0, 0)


class StepSizes:
    """Measures steps, every one of an engine in the order in which they are planned."""

    def __init__(self, max_running: int) -> None:
        self._lengths = np.zeros(max_running, dtype=np.int64)  # tokens of a row, that being sampled too

    @property
    def num_rows(self) -> int:
        """Rows that a step may have."""
        return len(self._lengths)

    def measure(self, step: Step) -> StepSize:
        """Returns what the step computes, and takes it as done."""
        decodes = np.frombuffer(step.decode_rows, dtype=np.int32)
        rows, starts, lengths, samples = (
            np.frombuffer(column, dtype=np.int32)
            for column in (step.prefill_rows, step.prefill_starts, step.prefill_lengths, step.prefill_samples)
        )
        context = int(self._lengths[decodes].sum())
        self._lengths[decodes] += 1
        self._lengths[rows] = starts + lengths + (samples > 0)
        pairs = int((lengths.astype(np.int64) * starts + lengths.astype(np.int64) * (lengths + 1) // 2).sum())
        copies = len(step.transfer_device_pages) // 4
        return StepSize(len(decodes), context, len(rows), int(lengths.sum()), pairs, copies)
