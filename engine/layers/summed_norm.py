"""Norms that sum over ranks, or over a token's experts: the layer in front of them leaves its sum to them, so that one
launch can do both.

Legend: T new tokens in the step · D model dim · K experts of a token
Owns: which norms of a decoder do so.  Does not know: kernels, libraries.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.layers.comm import NormingComm
from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.norm import RMSNorm, UnchangedNorm
from engine.layers.part import Attention, FeedForward, Norm
from engine.layers.weights import WeightSlice


@runtime_checkable
class SumLeaver(Protocol):
    """A part that can leave the sum of its result over ranks to its caller."""

    def leave_sum(self) -> NormingComm | None:
        """Return this rank's summand from now on, and here the group that sums it; None if that cannot be."""
        ...


@runtime_checkable
class PartsLeaver(Protocol):
    """A part that can leave the sum over a token's experts to its caller."""

    def leave_parts(self) -> bool:
        """Return summands, [T, K, D], from now on, and here whether that can be."""
        ...


class SummedLayer(Protocol):
    """A layer whose norms may sum.  takes_inserts: whether inserts are added to this rank's result."""

    attention: Attention | None
    mlp: FeedForward | None
    before_attention: Norm
    behind_attention: Norm
    before_mlp: Norm
    behind_mlp: Norm
    parallel: bool
    takes_inserts: bool

    @property
    def products(self) -> Sequence[object]: ...


class PartsNorm:
    """A norm of the residual stream and the sum over a token's experts."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._norm(x_TD)

    def added(self, x_TD: Tensor, update_TKD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Add the sum of ``update`` to x in place and return the norm of that.  update: [T, D] if it is summed."""
        if update_TKD is not None and kernels is None and update_TKD.dim() > x_TD.dim():
            update_TKD = update_TKD.sum(1)
        return self._norm.added(x_TD, update_TKD, kernels)

    def pack(self, kernels: LayerKernels | None) -> None:
        """Do nothing: the norm was prepared before."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return self._norm.slices(prefix)


class SummedNorm:
    """A norm of the residual stream and the sum of all ranks' updates.  is_first: whether this rank is the first."""

    def __init__(self, norm: RMSNorm, comm: NormingComm) -> None:
        self.is_first = comm.rank == 0
        self._norm = norm
        self._comm = comm

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._norm(x_TD)

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Add the sum of ``update`` over ranks to x in place and return the norm of that."""
        if update_TD is None:
            return self._norm.added(x_TD, None, kernels)
        if kernels is not None:
            normed_TD = self._comm.add_norm(x_TD, update_TD, self._norm.weight, self._norm.eps)
            if normed_TD is not None:
                return normed_TD
        return self._norm.added(x_TD, self._comm.all_reduce(update_TD), kernels)

    def pack(self, kernels: LayerKernels | None) -> None:
        """Do nothing: the norm was prepared before."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return self._norm.slices(prefix)


def leave_sums(layers: Sequence[SummedLayer], kernels: LayerKernels | None) -> None:
    """Let norms sum what the part in front of them gives, where the device and the group can do both at once.

    Called once, after loading.  The last layer's result is summed by that layer."""
    if not isinstance(kernels, DeviceKernels):
        return
    for number, layer in enumerate(layers):
        if layer.parallel or layer.mlp is None:
            continue
        if layer.attention is not None and len(layer.products) == 2:
            layer.before_mlp = _summing(layer.attention, layer.behind_attention, layer.before_mlp)
        if number + 1 < len(layers):
            behind = layers[number + 1]
            behind.before_attention = _summing(layer.mlp, layer.behind_mlp, behind.before_attention)
            if isinstance(behind.before_attention, SummedNorm):
                layer.takes_inserts = behind.before_attention.is_first


def _summing(part: Attention | FeedForward, between: Norm, norm: Norm) -> Norm:
    """Return the norm in the place of ``norm``, which sums if all three can leave it to that."""
    if type(between) is not UnchangedNorm or type(norm) is not RMSNorm:
        return norm
    if isinstance(part, PartsLeaver) and part.leave_parts():
        return PartsNorm(norm)
    comm = part.leave_sum() if isinstance(part, SumLeaver) else None
    return norm if comm is None else SummedNorm(norm, comm)
