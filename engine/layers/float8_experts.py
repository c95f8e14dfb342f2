"""Weights of experts in float8 as a checkpoint stores them: elements, and a scale per block of 128 x 128.

Legend: E experts · O outputs · I inputs · B blocks of outputs · C blocks of inputs
Owns: the memory, and which tensors of a file fill it.  Does not know: kernels, files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.layers.weights import WeightSlice, parameter

BLOCK: Final = 128
SCALES: Final = "weight_scale_inv"


class EightBits(NamedTuple):
    """The weights of one linear layer of all experts.  elements_EOI: float8.  scales_EBC: float32."""

    elements_EOI: Tensor
    scales_EBC: Tensor


def scales_of(name: str) -> str:
    """Return the name of the scales of a weight's tensor."""
    return f"{name.removesuffix('weight')}{SCALES}"


class StoredFloat8:
    """Memory for one linear layer of all experts, filled as files have it."""

    def __init__(self, num_experts: int, outputs: int, inputs: int, device: torch.device) -> None:
        blocks = (outputs // BLOCK, inputs // BLOCK)
        assert blocks[0] * BLOCK == outputs, f"{outputs} outputs are no whole blocks"
        assert blocks[1] * BLOCK == inputs, f"{inputs} inputs are no whole blocks"
        self._elements = parameter(num_experts, outputs, inputs, device=device, dtype=torch.float8_e4m3fn)
        self._scales = parameter(num_experts, *blocks, device=device, dtype=torch.float32)

    def slices(self, slices: Iterable[WeightSlice], place: int) -> Iterator[WeightSlice]:
        """Yield the slices of elements and scales that hold the weights of some slices of one expert.

        place: of its expert in the stack.  The slices' targets are parts of a weight's rows."""
        elements_OI, scales_BC = self._elements[place], self._scales[place]
        for one in slices:
            first = one.target.storage_offset() // elements_OI.shape[1]  # row of the weight, which has no memory
            count = one.target.shape[0]
            bounds = (first, count, one.start, one.length)
            assert not any(bound % BLOCK for bound in bounds), f"{one.source}: {bounds} are no whole blocks"
            outputs, inputs = one.shape
            yield replace(one, target=elements_OI[first : first + count])
            yield WeightSlice(
                scales_of(one.source),
                (outputs // BLOCK, inputs // BLOCK),
                one.dim,
                one.start // BLOCK,
                one.length // BLOCK,
                scales_BC[first // BLOCK : (first + count) // BLOCK],
            )

    def arranged(self) -> EightBits:
        """Return the weights as a kernel reads them, which is as they are stored."""
        return EightBits(self._elements, self._scales)
