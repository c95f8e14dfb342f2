"""The parts of a layer, and how they are built from their shapes: ``PartShape.built_by`` names the builder.

Owns: that look-up, and the protocols of parts.  Does not know: which parts there are, families.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from engine.checkpoints.shape import PartShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear
from engine.layers.rotary import Rotary
from engine.layers.states import StatesOfStep
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice

Built = TypeVar("Built", bound="Part")


class Part(Protocol):
    """A part of a layer, built with (shape, hidden_size, comm, device, dtype)."""

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare everything but the linear layers for the device and its kernels; called once, after loading."""
        ...

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads.  prefix: of its layer's tensors."""
        ...


class Norm(Part, Protocol):
    """The norm before attention, an MLP or the LM head."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the norm of x, [T, D]; x is not changed, and may be the result."""
        ...

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Add ``update``, if there is one, to x in place and return the norm of the sum."""
        ...


class Attention(Part, Protocol):
    """The attention part of a layer, in two halves around the backend's call, so that a graph can capture each.

    num_queries, num_keys: heads of this rank, as the backend sees them.
    sinks_Q: one entry of ``AttentionSpec.sinks``; None for none.
    linears: as in ``FeedForward``."""

    num_queries: int
    num_keys: int
    sinks_Q: Tensor | None

    @property
    def linears(self) -> Sequence[Linear]: ...

    def project(
        self,
        index: int,
        normed_TD: Tensor,
        rotary: Rotary | None,
        angles: tuple[Tensor, ...],
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """Return q_TQH of layer ``index`` and store the tokens' keys and values, or latents, in the pool.

        rotary: None for a layer without positions.  angles: the step's angles from ``rotary``."""
        ...

    def output(self, attended_TQH: Tensor) -> Tensor:
        """Return the layer's output, [T, D], whole on every rank, from the backend's result."""
        ...


class Recurrent(Part, Protocol):
    """A recurrent part of a layer, in two halves: the last layer computes the second one for wanted rows only.

    linears: as in ``FeedForward``."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def advance(
        self, normed_TD: Tensor, states: tuple[Tensor, ...], step: StatesOfStep, kernels: LayerKernels | None
    ) -> Tensor:
        """Return what ``output`` takes, two-dimensional, and advance the rows' states by the step's tokens.

        states: the layer's own in all slots."""
        ...

    def output(self, mixed_TM: Tensor) -> Tensor:
        """Return the layer's output, [T, D], from a result of ``advance``."""
        ...


class FeedForward(Part, Protocol):
    """An MLP, or another part in its place.

    linears: layers that the model's linear kernel computes; it lays their weights out and may round them."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Return the output, [T, D], a new tensor, whole on every rank."""
        ...


@runtime_checkable
class RowwisePart(Protocol):
    """A part that can compute a row in the same way whatever the number of rows; torch by itself does not."""

    def by_rows(self) -> None:
        """Make a row's bits independent of other rows; called once, before the first step."""
        ...


@runtime_checkable
class ExactPart(Protocol):
    """A part with products that are never rounded.  exacts: these, which ``linears`` leaves out."""

    @property
    def exacts(self) -> Sequence[Linear]: ...


def build(
    kind: type[Built], shape: PartShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
) -> Built:
    """Build the part of that shape.  kind: protocol that the caller expects of it, which is not checked."""
    module, _, name = shape.built_by.partition(":")
    built: Any = getattr(import_module(module), name)
    part: Built = built(shape, hidden_size, comm, device, dtype)
    return part
