"""The gated activation of an MLP: activation(gate) * up.

Legend: T new tokens in the step · I intermediate features of this rank
Owns: the formulas in torch.  Does not know: projections, which family uses which.
"""

import torch.nn.functional as F
from torch import Tensor

from engine.layers.kernels import LayerKernels


def gated(gate_up_T2I: Tensor, kind: str, kernels: LayerKernels | None) -> Tensor:
    """[T, I] from the merged projections, first all of gate.  kind: see ``DecoderShape.activation``."""
    if kernels is not None:
        return kernels.gated(gate_up_T2I, kind)
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    if kind == "silu":
        return F.silu(gate_TI).mul_(up_TI)
    return F.gelu(gate_TI, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none").mul_(up_TI)
