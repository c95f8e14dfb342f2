"""From a part's shape to what computes it: ``PartShape.built_by`` names what builds it.

Owns: that look-up, and what every part can do.  Does not know: which parts there are, families.
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
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice

Built = TypeVar("Built", bound="Part")


class Part(Protocol):
    """Built with (shape, hidden_size, comm, device, dtype)."""

    def pack(self, kernels: LayerKernels | None) -> None:
        """Prepare what is no linear layer for the device and its kernels; called once, after loading."""
        ...

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this part reads from a checkpoint.  prefix: of its layer's tensors."""
        ...


class Norm(Part, Protocol):
    """What stands before attention, an MLP or the LM head."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D]; x is left as it is, and may be the result."""
        ...

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """``x += update``, in place, where there is one, and the norm of the sum."""
        ...


class Attention(Part, Protocol):
    """The attention part of a layer, in two halves around the backend's call, so that each can be captured as a graph.

    num_queries, num_keys: heads of this rank, as the backend sees them.  sinks_Q: see ``AttentionSpec``; None for none.
    linears: as of ``FeedForward``."""

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
        """q_TQH of layer ``index``; what is kept of the tokens is in the pool afterwards.

        rotary: None for a layer without positions.  angles: of ``rotary`` for the step."""
        ...

    def output(self, attended_TQH: Tensor) -> Tensor:
        """[T, D] of what the backend returned, whole on every rank."""
        ...


class FeedForward(Part, Protocol):
    """An MLP, or what has its place.

    linears: what the model's linear kernel multiplies by; it is laid out for it, and may be rounded."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        """[T, D], a tensor of its own, whole on every rank."""
        ...


@runtime_checkable
class RowwisePart(Protocol):
    """What a part has beside, if torch computes a row otherwise where there are many."""

    def by_rows(self) -> None:
        """Give a row the same bits whatever other rows there are; called once, at the latest before the first step."""
        ...


def build(
    kind: type[Built], shape: PartShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
) -> Built:
    """The part of that shape.  kind: what its place in the layer asks for; it is the author's promise."""
    module, _, name = shape.built_by.partition(":")
    built: Any = getattr(import_module(module), name)
    part: Built = built(shape, hidden_size, comm, device, dtype)
    return part
