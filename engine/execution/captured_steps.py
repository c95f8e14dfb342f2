"""Protocols of captured steps, as the runner uses them: decode steps as one call, the model between attention calls.

Legend: N decode rows of the step · V vocabulary
Owns: the protocols.  Does not know: how steps are captured (``engine/graphs/``) or compiled.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

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
    """Decode steps that run whole, by one graph or one call of C."""

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
