"""Weights of experts in MXFP4 as a kernel reads them: two groups of 32 inputs side by side, for each row.

Legend: E experts · O outputs · G groups of 32 inputs with a scale of their own · P pairs of groups · B 32 bytes
Owns: the order of the codes.  Does not know: kernels, files.

A file has the codes of one group in 16 bytes, neighbours in one byte.  Here byte b has input b of one group in its
lower half, and input b of the next group in its upper half, so that each half of the bytes is 32 inputs in order.
Rows of a pair lie one after the other, so that a tile of rows is read in whole lines.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.checkpoints.quantization import MXFP4_GROUP
from engine.layers.weights import WeightSlice, parameter

GROUP: Final = MXFP4_GROUP
GROUP_BYTES: Final = GROUP // 2


class FourBits(NamedTuple):
    """The weights of one linear layer of all experts.  codes_EPOB, scales_EP2O: uint8; a scale is 2^(scale - 127)."""

    codes_EPOB: Tensor
    scales_EP2O: Tensor


class StoredCodes:
    """Memory for one linear layer of all experts, filled as files have it, and then brought into a kernel's order.

    codes_EOGB, scales_EOG: where the file's codes and scales go."""

    def __init__(self, num_experts: int, outputs: int, inputs: int, device: torch.device) -> None:
        groups = inputs // GROUP
        self._pairs = -(-groups // 2)
        self._codes = parameter(num_experts, outputs, 2 * self._pairs, GROUP_BYTES, device=device, dtype=torch.uint8)
        self._scales = parameter(num_experts, outputs, 2 * self._pairs, device=device, dtype=torch.uint8)
        self.codes_EOGB, self.scales_EOG = self._codes[:, :, :groups], self._scales[:, :, :groups]
        self._codes[:, :, groups:] = self._scales[:, :, groups:] = 0  # a group of zeros

    def slices(self, one: WeightSlice, place: int) -> Iterator[WeightSlice]:
        """Yield the slices of codes and scales that hold the weight of one slice.  place: of its expert in the stack.

        A rank has whole groups of inputs."""
        size = GROUP if one.dim == 1 else 1
        assert one.start % size == one.length % size == 0, f"{one.source}: {one.length} inputs from {one.start}"
        name, (outputs, inputs) = one.source.removesuffix(".weight"), one.shape
        codes, scales = self.codes_EOGB[place], self.scales_EOG[place]
        if one.dim == 1:  # what fills the last pair of groups is padding of the slice
            codes, scales = self._codes[place], self._scales[place]
        for kind, target, shape in (
            ("blocks", codes, (outputs, inputs // GROUP, GROUP_BYTES)),
            ("scales", scales, (outputs, inputs // GROUP)),
        ):
            yield WeightSlice(f"{name}_{kind}", shape, one.dim, one.start // size, one.length // size, target)

    def arranged(self) -> FourBits:
        """Bring codes and scales into the kernel's order, within their memory; call it once."""
        num_experts, outputs = self._codes.shape[:2]
        codes_EPOB = self._codes.view(num_experts, self._pairs, outputs, GROUP)
        scales_EP2O = self._scales.view(num_experts, self._pairs, 2, outputs)
        for codes_OGB, codes_POB in zip(self._codes, codes_EPOB, strict=True):
            inputs_OP2I = torch.stack((codes_OGB & 15, codes_OGB >> 4), -1).view(outputs, self._pairs, 2, GROUP)
            codes_POB.copy_((inputs_OP2I[:, :, 0] | inputs_OP2I[:, :, 1] << 4).transpose(0, 1))
        for scales_OG, scales_P2O in zip(self._scales, scales_EP2O, strict=True):
            scales_P2O.copy_(scales_OG.t().clone(memory_format=torch.contiguous_format).view(scales_P2O.shape))
        return FourBits(codes_EPOB, scales_EP2O)
