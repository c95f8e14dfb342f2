"""Norms and gates whose result is rounded to 8 bits in their own launch, for a product that reads it so.

Legend: T new tokens in the step · D model dim · I intermediate features · G groups of a row
Owns: rows with their scales, and which norms and gates of a decoder round.  Does not know: kernels, formats of weights.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.linear import Linear
from engine.layers.mlp import MLP, GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.part import Attention, FeedForward, Norm
from engine.layers.self_attention import SelfAttention
from engine.layers.weights import WeightSlice


class RoundedRows(Tensor):
    """Rows in 8 bits; there may be more than the step has.  scales_TG: float32.  num_rows: of the step."""

    scales_TG: Tensor
    num_rows: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the operation gives of plain tensors."""
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, rounded: tuple[Tensor, Tensor], num_rows: int) -> Self:
        """Return these numbers with their scales."""
        numbers_TI, scales_TG = rounded
        rows = numbers_TI.as_subclass(cls)
        rows.scales_TG, rows.num_rows = scales_TG, num_rows
        return rows


@runtime_checkable
class RoundingWeight(Protocol):
    """A packed weight that rounds its input, and also takes ``RoundedRows``.

    input_group: numbers of a row that have a scale together; 0 for all.  input_width: numbers of a row."""

    input_group: int
    input_width: int


class Rounding:
    """The rounding of a product's input.  A product that something is added to later, such as adapters, has none."""

    def __init__(self, linear: Linear, weight: RoundingWeight) -> None:
        self.group = weight.input_group
        self._linear = linear
        self._kind: type = type(weight)

    @property
    def wanted(self) -> bool:
        """Whether the product reads rounded rows now."""
        return type(self._linear.packed) is self._kind


class RoundingNorm:
    """A norm whose result only one product reads."""

    def __init__(self, norm: RMSNorm, rounding: Rounding) -> None:
        self._norm = norm
        self._rounding = rounding

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._norm(x_TD)

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Add ``update`` to x in place and return the norm of the sum, rounded if the product reads it so."""
        if update_TD is None or not isinstance(kernels, DeviceKernels) or not self._rounding.wanted:
            return self._norm.added(x_TD, update_TD, kernels)
        norm, group = self._norm, self._rounding.group
        return RoundedRows.of(kernels.add_norm_round(x_TD, update_TD, norm.weight, norm.eps, group), len(x_TD))

    def pack(self, kernels: LayerKernels | None) -> None:
        """Do nothing: the norm was prepared before."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return self._norm.slices(prefix)


class RoundingMLP(GatedMLP):
    """A gated MLP, with the parts of another one, whose gate rounds."""

    def __init__(self, mlp: GatedMLP, rounding: Rounding) -> None:
        vars(self).update(vars(mlp))
        self._rounding = rounding

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        if not isinstance(kernels, DeviceKernels) or not self._rounding.wanted:
            return super().__call__(x_TD, kernels)
        gate_up_T2I = self.gate_up(x_TD)
        rounded = kernels.gated_round(gate_up_T2I, self.shape.activation, self._rounding.group)
        return self.down(RoundedRows.of(rounded, len(gate_up_T2I)))


class RoundedLayer(Protocol):
    """A layer whose norms and gate may round."""

    attention: Attention | None
    mlp: FeedForward | None
    before_attention: Norm
    before_mlp: Norm
    parallel: bool

    @property
    def products(self) -> Sequence[object]: ...


def join_roundings(layers: Sequence[RoundedLayer], kernels: LayerKernels | None) -> None:
    """Let norms and gates round for the product behind them, where it rounds and nothing else reads their result.

    Called once, after loading."""
    if not isinstance(kernels, DeviceKernels):
        return
    for layer in layers:
        if layer.parallel:
            continue
        if type(layer.attention) is SelfAttention and layer.products[:1] == (layer.attention,):
            alone = len(layer.products) == 1 or layer.products[1] is layer.mlp
            if alone and (found := _rounding(layer.attention.qkv, kernels)) is not None:
                layer.before_attention = _rounded(layer.before_attention, found)
        if isinstance(mlp := layer.mlp, GatedMLP | MLP):
            first = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up
            if (found := _rounding(first, kernels)) is not None:
                layer.before_mlp = _rounded(layer.before_mlp, found)
            if type(mlp) is GatedMLP and (found := _rounding(mlp.down, kernels)) is not None:
                layer.mlp = RoundingMLP(mlp, found)


def _rounding(linear: Linear, kernels: DeviceKernels) -> Rounding | None:
    weight = linear.packed
    if not isinstance(weight, RoundingWeight) or weight.input_width > kernels.widest_rounded:
        return None
    return Rounding(linear, weight)


def _rounded(norm: Norm, rounding: Rounding) -> Norm:
    return RoundingNorm(norm, rounding) if type(norm) is RMSNorm else norm
