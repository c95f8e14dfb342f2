"""Protocols of captured steps, as the runner uses them: decode steps as one call, the model between attention calls.

Legend: N decode rows of the step · V vocabulary
Owns: the protocols, the places of a step's tokens.  Does not know: how steps are captured (``engine/graphs/``).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.execution.batch import Int64, decode_rows
from engine.layers.step import StepTensors
from engine.messages import Step
from engine.sampling.captured import SamplingVariant


class StepEvent(Protocol):
    """A place in the stream of queued work."""

    def record(self) -> None:
        """Move the place to the end of everything that is queued now."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the place."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the place."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a queued step.

    token_ids_N: int64, on the host; read it when ``event`` is reached, at once if that is None.
    logits_NV: if nothing was sampled; use it before the next step.
    write_at_N: int64, the places of the tokens.
    """

    token_ids_N: Tensor | None
    event: StepEvent | None
    logits_NV: Tensor | None
    write_at_N: Tensor


class CapturedDecodes(Protocol):
    """Decode steps that run whole, by one graph or one call of C.

    verifies: whether a step may also have rows with several tokens, each of which samples one, at positions that the
    step states."""

    @property
    def verifies(self) -> bool: ...

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a captured step for so many rows."""
        ...

    def variant_of(self, rows_N: npt.NDArray[np.int64], positions_N: npt.NDArray[np.int64]) -> SamplingVariant:
        """Return how a step of these rows will be sampled.  positions_N: positions of the tokens that are sampled."""
        ...

    def apply(self, step: Step) -> None:
        """Take in the changes since the last step, including new pages of rows."""
        ...

    def launch(
        self, rows_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int32], variant: SamplingVariant
    ) -> Decoded:
        """Queue the step that ``tell`` was last called with.  lengths_N: lengths including the new token."""
        ...


class CapturedModel(Protocol):
    """The model between attention calls, captured in pieces."""

    @property
    def captured(self) -> tuple[int, ...]:
        """Numbers of tokens for which there is a recording."""
        ...

    def forward(self, step: StepTensors) -> Tensor:
        """Return logits_NV (``Decoder.forward``)."""
        ...

    def hidden(self, step: StepTensors, wanted_N: Tensor) -> Tensor:
        """Return x_ND of the wanted rows (``Decoder.hidden``)."""
        ...


class Captures(Protocol):
    """Everything that was captured on a device."""

    def discard(self) -> None:
        """Free all recordings, even if something refers to them."""
        ...


def token_places(step: Step) -> tuple[Int64, Int64]:
    """Return the row of each token of a step, and the position if the step states it, else -1."""
    decodes = decode_rows(step)
    if not step.prefill_rows:
        return decodes, np.full(len(decodes), -1)
    rows, starts, lengths = (
        np.frombuffer(column, dtype=np.int32)
        for column in (step.prefill_rows, step.prefill_starts, step.prefill_lengths)
    )
    nth = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    given = np.concatenate((np.full(len(decodes), -1), np.repeat(starts, lengths) + nth))
    return np.concatenate((decodes, np.repeat(rows, lengths))).astype(np.int64), given.astype(np.int64)
