"""The feed-forward part of a layer: two products with an activation, or a gate, between them.

Legend: T new tokens in the step · D model dim · I intermediate features of this rank
Owns: the order of operations, the activations' formulas in torch.  Does not know: which model it is in, files.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import GatedShape, MLPShape, ScaledGatedShape
from engine.layers.comm import Comm, NormingComm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.weights import WeightSlice, joined, transposed

# torch divides an operation on at least so many elements among threads, at places that depend on their number.  It
# computes the remainder at the end of a thread's part, or of a row with a gap after it, by other instructions, and so
# all of gelu of rows with gaps.
DIVIDED = 32768
VECTORS = 128  # a multiple of so many elements has no remainder


def activated(x_TI: Tensor, kind: str) -> Tensor:
    """Return the activation of x, [T, I].  kind: one of ``MLPShape.activation``, or sigmoid for a gate."""
    if kind == "relu2":
        return F.relu(x_TI).square()
    if kind == "silu":
        return F.silu(x_TI)
    if kind == "sigmoid":
        return torch.sigmoid(x_TI)
    return F.gelu(x_TI, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")


def activated_by_rows(x_TI: Tensor, kind: str, activate: Callable[[Tensor, str], Tensor] = activated) -> Tensor:
    """Return what ``activate`` does, with the same bits for an element whatever other rows and features there are.

    No thread begins within a row, zeros fill a row's last vectors, and rows have no gaps."""
    width = x_TI.shape[1]
    left = -width % VECTORS
    filled = F.pad(x_TI, (0, left)) if left else x_TI.contiguous()
    rows = max(1, (DIVIDED - 1) // (width + left))
    if len(x_TI) > rows:
        whole = torch.cat([activate(part, kind) for part in filled.split(rows)])
    else:
        whole = activate(filled, kind)
    return whole[:, :width] if left else whole


def gated(
    gate_up_T2I: Tensor,
    kind: str,
    kernels: LayerKernels | None,
    activate: Callable[[Tensor, str], Tensor] = activated,
) -> Tensor:
    """Return activation(gate) * up, [T, I].  gate_up_T2I: all of gate, then all of up.  kind: as for ``activated``."""
    if kernels is not None:
        return kernels.gated(gate_up_T2I, kind)
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return activate(gate_TI, kind).mul_(up_TI)


def clamped_swish(
    gate_up_TI2: Tensor, limit: float, slope: float, activate: Callable[[Tensor, str], Tensor] = activated
) -> Tensor:
    """Return (up + 1) gate sigmoid(slope gate), [T, I], of clamped gates and ups, which alternate in the input."""
    gate_TI, up_TI = gate_up_TI2.unflatten(-1, (-1, 2)).unbind(-1)
    gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)
    return (up_TI + 1) * (gate_TI * activate(gate_TI * slope, "sigmoid"))


class GatedMLP:
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(
        self, shape: GatedShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.gate_up = ColumnLinear(hidden_size, shape.inner, shape.bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden_size, shape.bias, comm, device, dtype)
        self.linears = (self.gate_up, self.down)
        self._activate = activated

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.down(gated(self.gate_up(x_TD), self.shape.activation, kernels, self._activate))

    def by_rows(self) -> None:
        """Compute the activation by rows (``RowwisePart``)."""
        self._activate = activated_by_rows

    def leave_sum(self) -> NormingComm | None:
        return self.down.leave_sum()

    def pack(self, kernels: LayerKernels | None) -> None:
        """Do nothing: there are only linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.gate_up.slices(name)
        yield from self.down.slices(f"{name}.{self.shape.down}")


class ScaledGatedMLP(GatedMLP):
    """A gated MLP: down(activation(scale * gate(x)) * up(x))."""

    def __init__(
        self, shape: ScaledGatedShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, hidden_size, comm, device, dtype)
        self._scale = shape.gate_scale

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        gate_up_T2I = self.gate_up(x_TD)
        gate_up_T2I.chunk(2, -1)[0].mul_(self._scale)
        return self.down(gated(gate_up_T2I, self.shape.activation, kernels, self._activate))


class MLP:
    """A plain MLP: down(activation(up(x)))."""

    def __init__(self, shape: MLPShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.up = ColumnLinear(hidden_size, [(shape.up, shape.intermediate_size)], shape.bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden_size, shape.bias, comm, device, dtype)
        self.linears = (self.up, self.down)
        self._activate = activated

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.down(self._activate(self.up(x_TD), self.shape.activation))

    def by_rows(self) -> None:
        """Compute the activation by rows (``RowwisePart``)."""
        self._activate = activated_by_rows

    def leave_sum(self) -> NormingComm | None:
        return self.down.leave_sum()

    def pack(self, kernels: LayerKernels | None) -> None:
        """Do nothing: there are only linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        for linear, source in ((self.up, name), (self.down, f"{name}.{self.shape.down}")):
            slices = linear.slices(source)
            yield from transposed(slices) if self.shape.transposed else slices
