"""Small integers that are stored several in one int32, and the weights that they, their zero points and scales give.

Legend: O outputs · I inputs · G groups of inputs with a scale of their own · P integers in an int32
Owns: the order of the integers in each format, the arithmetic.  Does not know: files, names of tensors.
Results are float32: the products of integers and scales are exact in it.
"""

import torch
from torch import Tensor

# AWQ writes columns 0 2 4 6 1 3 5 7 into one int32, lowest bits first: so column 1 is found in the fifth place.
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Integers from 0 to 2^bits - 1, lowest bits first, along ``dim`` of a matrix of int32; int32."""
    shifts_P = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    integers = packed.unsqueeze(dim + 1).bitwise_right_shift(shifts_P.view(shape)).bitwise_and_((1 << bits) - 1)
    return integers.flatten(dim, dim + 1)


def awq(qweight: Tensor, qzeros: Tensor, scales_GO: Tensor, block: tuple[int, int]) -> Tensor:
    """weight_OI.  qweight: [I, O / P].  qzeros: [G, O / P]."""

    def columns(packed: Tensor) -> Tensor:
        return unpack(packed, 4, 1).unflatten(1, (-1, len(AWQ_PLACES)))[:, :, AWQ_PLACES].flatten(1)

    return scaled(columns(qweight).t(), scales_GO.t(), columns(qzeros).t(), block)


def gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales_GO: Tensor,
    groups_I: Tensor | None,
    block: tuple[int, int],
    bits: int,
    zero_offset: int,
) -> Tensor:
    """weight_OI.  qweight: [I / P, O].  qzeros: [G, O / P].  groups_I: of each input; None for all in order."""
    zeros_GO = unpack(qzeros, bits, 1) + zero_offset
    return scaled(unpack(qweight, bits, 0).t(), scales_GO.t(), zeros_GO.t(), block, groups_I)


def packed(
    packed_OI: Tensor,
    scales_OG: Tensor,
    zeros: Tensor | None,
    groups_I: Tensor | None,
    block: tuple[int, int],
    bits: int,
) -> Tensor:
    """weight_OI of compressed-tensors.  packed_OI: [O, I / P].  zeros: [O / P, G]; None where they are all 0.

    Integers are stored from 0 and stand for those from -2^(bits - 1)."""
    middle = 1 << bits - 1
    zeros_OG = None if zeros is None else (unpack(zeros, bits, 0) - middle)[: len(scales_OG)]
    return scaled(unpack(packed_OI, bits, 1) - middle, scales_OG, zeros_OG, block, groups_I)


def scaled(
    weight_OI: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: tuple[int, int],
    groups_I: Tensor | None = None,
) -> Tensor:
    """weight_OI, whose elements are numbers already, less their zero points and times their scales.

    scales, zeros: one, one per output, or a matrix with one per block.  block: its outputs and inputs, 0 for all.
    groups_I: the group of each input, where they are in no order.  Raises ValueError if they do not fit each other."""
    outputs, inputs = weight_OI.shape

    def spread(one: Tensor) -> Tensor:
        one = one.float()
        if one.dim() < 2:
            one = one.reshape(-1, 1)  # of the tensor, or of each output
        fit = [-(-size // (length or size)) for size, length in zip((outputs, inputs), block, strict=True)]
        if one.dim() > 2 or any(there not in (1, wanted) for there, wanted in zip(one.shape, fit, strict=True)):
            raise ValueError(f"{' x '.join(map(str, fit))} scales and zero points wanted")
        rows, columns = one.shape
        if columns > 1 and groups_I is not None:
            if len(groups_I) != inputs or groups_I.min() < 0:
                raise ValueError("groups of inputs wanted, one for each input")
            one = one[:, groups_I.long()]
        elif columns > 1:
            one = one.repeat_interleave(block[1], 1)[:, :inputs]
        return one if rows == 1 else one.repeat_interleave(block[0] or outputs, 0)[:outputs]

    weight_OI = weight_OI.float()
    if zeros is not None:
        weight_OI = weight_OI - spread(zeros)
    return weight_OI * spread(scales)
