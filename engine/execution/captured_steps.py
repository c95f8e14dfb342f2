"""What the runner asks of captured steps: decode steps as one call, the model between attention calls, one device.

Legend: N decode rows of the step · V vocabulary
Owns: the protocols.  Does not know: how steps are captured, see ``engine/graphs/``, or compiled.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.layers.step import StepTensors
from engine.messages import Step
from engine.sampling.captured import Variant


class Event(Protocol):
    """A place in the stream of queued work."""

    def record(self) -> None:
        """Put the place behind everything that is queued now."""
        ...

    def query(self) -> bool:
        """Whether the device has reached the place."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the place."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step that is queued.

    Sampled: token_ids_N, int64, on the host, to be read once ``event`` is reached; at once where that is None.
    Else logits_NV, to be used before the next step, and write_at_N, int64, where the tokens belong.
    """

    token_ids_N: Tensor | None
    event: Event | None
    logits_NV: Tensor | None
    write_at_N: Tensor


class CapturedDecodes(Protocol):
    """Decode steps that run whole, by one graph or one call of C."""

    def fits(self, num_rows: int) -> bool:
        """Whether there is one for so many rows."""
        ...

    def variant_of(self, rows_N: npt.NDArray[np.int64], positions_N: npt.NDArray[np.int64]) -> Variant:
        """How a step of these rows will be sampled.  positions_N: of the tokens that are sampled."""
        ...

    def tell(self, step: Step) -> None:
        """Take in what has changed since the last step, also which pages rows got."""
        ...

    def launch(self, rows_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int32], variant: Variant) -> Decoded:
        """Queue the step that ``tell`` was last called with.  lengths_N: the new token included."""
        ...


class CapturedModel(Protocol):
    """The model between attention calls, captured in pieces."""

    @property
    def captured(self) -> tuple[int, ...]:
        """Numbers of tokens for which there is a recording."""
        ...

    def forward(self, step: StepTensors) -> Tensor:
        """logits_NV; see ``Decoder.forward``."""
        ...

    def hidden(self, step: StepTensors, wanted_N: Tensor) -> Tensor:
        """x_ND of the wanted rows; see ``Decoder.hidden``."""
        ...


class Captures(Protocol):
    """Everything that was captured on a device."""

    def discard(self) -> None:
        """Free all recordings, whoever refers to them."""
        ...
