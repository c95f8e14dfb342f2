"""A step whose kernels are queued, and the result that it becomes.

Owns: the wait for the device, the columns of a result, the places of samples.  Does not know: how it is launched.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.execution.batch import Int32, Int64, decode_rows, lay_out
from engine.execution.captured_steps import StepEvent
from engine.execution.prompts import Columns, PromptResult
from engine.messages import Step, StepDone, StepExtras
from engine.sampling.sampler import SampledTokens

T = TypeVar("T")


def extras_by_row(columns: Columns) -> dict[int, StepExtras]:
    """Return row -> its extras, from one mapping of rows for each field."""
    columns = {name: of for name, of in columns.items() if of}
    if len(columns) == 1:
        ((name, of),) = columns.items()
        return {row: StepExtras(**{name: of[row]}) for row in sorted(of)}
    rows = {row for values in columns.values() for row in values}
    return {row: StepExtras(**{name: of[row] for name, of in columns.items() if row in of}) for row in sorted(rows)}


@dataclass(slots=True)
class LaunchedStep:
    """A step whose kernels are queued.

    rows_N: the rows that sample.
    event: recorded after the step's copies to the host; None on a CPU.
    prompts: results for prompts.
    failures: index in N -> the reason why there is no token.
    note: that of ``StepDone``.
    parts: encoders of its parts, which are called when the device is done with the step."""

    rank: int
    step_id: int
    rows_N: npt.NDArray[np.int64]
    sampled: SampledTokens
    event: StepEvent | None
    prompts: tuple[PromptResult, ...]
    failures: dict[int, str]
    note: str = ""
    parts: dict[str, Callable[[], bytes]] = field(default_factory=dict)

    def ready(self) -> bool:
        """Return whether the device is done with the step."""
        return self.event is None or self.event.query()

    def collect(self) -> StepDone:
        """Wait for the device and return the result, its tokens as bytes."""
        token_ids = self.tokens().astype(np.int32, copy=False).tobytes()
        columns: Columns = {
            **(self.sampled.logprobs.by_row(self.rows_N) if self.sampled.logprobs is not None else {}),
            "failure": self._by_row(self.failures),
        }
        for prompts in self.prompts:
            columns.update(prompts.columns())
        return StepDone(
            rank=self.rank,
            step_id=self.step_id,
            token_ids=token_ids,
            extras=extras_by_row(columns),
            note=self.note,
            parts={name: encode() for name, encode in self.parts.items()},
        )

    def _by_row(self, by_index: dict[int, T]) -> dict[int, T]:
        return {int(self.rows_N[index]): value for index, value in by_index.items()}

    def tokens(self) -> npt.NDArray[np.int64]:
        """Wait for the device and return the tokens, int64[N].  Can be called on any thread."""
        if self.event is not None:
            self.event.synchronize()
        return self.sampled.token_ids_N.numpy()


def sampled_places(step: Step, computed: Int32) -> tuple[Int64, Int64]:
    """Return row and position of each sampled token, as ``lay_out`` does, which takes longer for a step of decodes."""
    if step.prefill_rows:
        batch = lay_out(step, computed)
        return batch.sample_rows_N, batch.sample_positions_N
    decodes = decode_rows(step)
    computed[decodes] += 1
    return decodes, computed[decodes].astype(np.int64)
