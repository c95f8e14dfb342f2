"""Products of float32 inputs with int8 or int4 weights by Intel's AutoRound Kernel (ARK), made for Xeons with AMX.

Legend: T rows of the input · I input features · O output features · G groups of inputs with a scale of their own
int8 has a scale per output, int4 one per 32 inputs.  Whether inputs are rounded too is ARK's choice by the CPU.
"""

from typing import Any

import torch
from torch import Tensor

from callboard.plugins import LinearContext, Options, PluginError, decode_options, hookimpl

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "quantizations": ["int8", "int4"],
    "instruction_sets": ["avx2"],
}
GROUP = 32  # inputs that share a scale with 4 bits
SMALLEST = 1e-30  # instead of 0 where all elements are, so that nothing is divided by it


class ArkWeight:
    """W[O, I] in ARK's layout."""

    def __init__(self, ark: Any, quantization: str, group: int, weight_OI: Tensor) -> None:
        largest = 127 if quantization == "int8" else 7
        groups_OGI = weight_OI.unflatten(1, (-1, group))
        scales_OG = groups_OGI.abs().amax(2).clamp_min_(SMALLEST).div_(largest)
        integers_OGI = (groups_OGI / scales_OG[:, :, None]).round_().to(torch.int8)
        outputs, inputs = weight_OI.shape
        # Types of the arithmetic, weights and scales; then whether there are zero points.
        self._format = (group, "auto", quantization, "fp32", False)
        none = torch.empty(0, dtype=torch.int8)
        # Without gaps and kept until it is done: ARK would take the address of a copy that is gone again.
        integers_IO, scales_GO = integers_OGI.flatten(1).t().contiguous(), scales_OG.t().contiguous()
        self._packed = ark.repack_quantized_weight(integers_IO, scales_GO, none, *self._format)
        self._multiply = ark.woqgemm
        self._shape = (outputs, inputs)
        self._no_bias = torch.empty(0)
        self.nbytes = self._packed.nbytes

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        if not len(x_TI):
            return x_TI.new_empty((0, self._shape[0]))
        bias_O = self._no_bias if bias_O is None else bias_O
        x_TI = x_TI.contiguous()
        y_TO: Tensor = self._multiply(x_TI, self._packed, bias_O, *self._shape, *self._format)
        return y_TO


class Ark:
    """Rounds every weight, but those whose inputs make no whole groups."""

    def __init__(self, quantization: str) -> None:
        import auto_round_kernel

        if auto_round_kernel.cpu_lib is None:
            raise ImportError("auto-round-lib has no kernels for this CPU or this version of Python")
        self._ark = auto_round_kernel
        self._quantization = quantization
        self.element_bytes = 1.0 if quantization == "int8" else 0.5 + torch.float32.itemsize / GROUP

    def pack(self, weight_OI: Tensor) -> ArkWeight | None:
        """See ``LinearKernel.pack``."""
        group = weight_OI.shape[1] if self._quantization == "int8" else GROUP
        return None if weight_OI.shape[1] % group else ArkWeight(self._ark, self._quantization, group, weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> Ark:
    """ARK's products.  Raises PluginError if its package is missing, or has nothing for this CPU."""
    decode_options("linear.ark", context.options, Options)
    try:
        return Ark(context.quantization)
    except ImportError as error:
        raise PluginError(f"plugin linear.ark: {error}") from None
