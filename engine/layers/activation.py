"""The activations of MLPs, gated ones in one piece: activation(gate) * up.

Legend: T new tokens in the step · I intermediate features of this rank
Owns: the formulas in torch.  Does not know: projections, which family uses which.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.kernels import LayerKernels


def activated(x_TI: Tensor, kind: str) -> Tensor:
    """[T, I].  kind: see ``GatedShape.activation``."""
    if kind == "silu":
        return F.silu(x_TI)
    return F.gelu(x_TI, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")


def gated(gate_up_T2I: Tensor, kind: str, kernels: LayerKernels | None) -> Tensor:
    """[T, I] from the merged projections, first all of gate.  kind: see ``GatedShape.activation``."""
    if kernels is not None:
        return kernels.gated(gate_up_T2I, kind)
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return activated(gate_TI, kind).mul_(up_TI)


def clamped_swish(gate_up_TI2: Tensor, limit: float, slope: float) -> Tensor:
    """[T, I] from gates and ups that alternate: (up + 1) gate sigmoid(slope gate), of values cut at the limit."""
    gate_TI, up_TI = gate_up_TI2.unflatten(-1, (-1, 2)).unbind(-1)
    gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)
    return (up_TI + 1) * (gate_TI * torch.sigmoid(gate_TI * slope))
