"""Small integers packed into int32, and the weights that result from them, their zero points and their scales.

Legend: O outputs · I inputs · G groups of inputs with a scale of their own · P integers in an int32
Owns: the order of the integers in each format, the arithmetic.  Does not know: files, names of tensors.
Results are float32, in which the products of integers and scales are exact.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

INT32_BITS = 32
# AWQ writes columns 0 2 4 6 1 3 5 7 into one int32, lowest bits first, so that column 1 is in the fifth place.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(packed: Tensor, bits: int, dim: int, places: Sequence[int] = ()) -> Tensor:
    """Unpack integers from 0 to 2^bits - 1, lowest bits first, along ``dim`` of a matrix of int32; returns int32.

    places: the place of the first, second, ... integer in an int32, if they are not in order.
    Raises RuntimeError for 3 bits if the int32s are no multiple of 3: 32 integers take three of them."""
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    if INT32_BITS % bits:
        return _unpack_cut(packed.unflatten(dim, (-1, bits)), bits, dim, shape)
    places = places or range(INT32_BITS // bits)
    shifts_P = torch.tensor([bits * place for place in places], dtype=torch.int32)
    integers = packed.unsqueeze(dim + 1).bitwise_right_shift(shifts_P.view(shape)).bitwise_and_((1 << bits) - 1)
    return integers.flatten(dim, dim + 1)


def _unpack_cut(words: Tensor, bits: int, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Unpack 32 integers from each ``bits`` int32s, which form one long number, lowest bits first."""
    first = torch.arange(0, INT32_BITS * bits, bits)
    low, shifts = first // INT32_BITS, first % INT32_BITS
    unsigned = words.long().bitwise_and_((1 << INT32_BITS) - 1)
    integers = unsigned.index_select(dim + 1, low).bitwise_right_shift_(shifts.view(shape))
    above = unsigned.index_select(dim + 1, (low + 1).clamp_max_(bits - 1))
    integers |= above.bitwise_left_shift_((INT32_BITS - shifts).view(shape))
    return integers.bitwise_and_((1 << bits) - 1).int().flatten(dim, dim + 1)


class Form(Protocol):
    """The form that unpacked integers get: ``scaled`` or ``stored``."""

    def __call__(
        self,
        weight_OI: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        block: tuple[int, int],
        groups_I: Tensor | None,
        /,
    ) -> Tensor: ...


def awq(form: Form, qweight: Tensor, qzeros: Tensor, scales_GO: Tensor, block: tuple[int, int]) -> Tensor:
    """Return a weight in a form.  qweight: [I, O / P].  qzeros: [G, O / P]."""
    # Transposed before unpacking, when they have an eighth as many elements.
    weight_OI, zeros_OG = (unpack(one.t().contiguous(), 4, 0, AWQ_PLACES) for one in (qweight, qzeros))
    return form(weight_OI, scales_GO.t(), zeros_OG, block, None)


def gptq(
    form: Form,
    qweight: Tensor,
    qzeros: Tensor,
    scales_GO: Tensor,
    groups_I: Tensor | None,
    block: tuple[int, int],
    bits: int,
    zero_offset: int,
) -> Tensor:
    """Return a weight in a form.  qweight: [I / P, O].  qzeros: [G, O / P].

    groups_I: group of each input; None if in order."""
    zeros_OG = unpack(qzeros.t().contiguous(), bits, 0) + zero_offset
    return form(unpack(qweight.t().contiguous(), bits, 1), scales_GO.t(), zeros_OG, block, groups_I)


def packed(
    form: Form,
    packed_OI: Tensor,
    scales_OG: Tensor,
    zeros: Tensor | None,
    groups_I: Tensor | None,
    block: tuple[int, int],
    bits: int,
) -> Tensor:
    """Return a weight of compressed-tensors in a form.  packed_OI: [O, I / P].  zeros: [O / P, G]; None if all are
    2^(bits - 1), the offset with which integers are stored."""
    middle = torch.tensor([1 << bits - 1], dtype=torch.int32)
    zeros_OG = middle if zeros is None else unpack(zeros, bits, 0)[: len(scales_OG)]
    return form(unpack(packed_OI, bits, 1), scales_OG, zeros_OG, block, groups_I)


def stored(
    weight_OI: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int], groups_I: Tensor | None
) -> Tensor:
    """Return rows of blocks as ``linear.blocks`` reads them, uint8: for each group of inputs its scale of 16 bits, its
    zero point, and two integers of 4 bits per byte, of which the lower ones are the group's first half.

    Raises ValueError for a weight that has no such form: its groups are not in order, or it does not fill them."""
    (outputs, inputs), (_, width) = weight_OI.shape, block
    fit = (outputs, inputs // width)
    if groups_I is not None and not torch.equal(groups_I.long(), torch.arange(inputs) // width):
        raise ValueError("its groups of inputs are not in order")
    if zeros is None or inputs % width or tuple(scales.shape) != fit or scales.dtype.itemsize != 2:
        raise ValueError(f"it has no zero points, or not {fit[0]} x {fit[1]} scales of 16 bits")
    half_OGH, upper_OGH = weight_OI.to(torch.uint8).view(*fit, 2, width // 2).unbind(2)
    parts = scales.contiguous().view(torch.uint8).view(*fit, 2), zeros.to(torch.uint8).expand(fit)[..., None]
    return torch.cat([*parts, half_OGH | upper_OGH << 4], 2).flatten(1)


def scaled(
    weight_OI: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int], groups_I: Tensor | None = None
) -> Tensor:
    """Subtract zero points from weight_OI, which is unpacked, and multiply it by its scales; return float32.

    scales, zeros: one, one per output, or a matrix with one per block.  block: its outputs and inputs, 0 for all.
    groups_I: group of each input, if they are not in order.  Raises ValueError if the operands do not fit each other.
    """
    outputs, inputs = weight_OI.shape
    if not weight_OI.numel():
        raise ValueError(f"a weight of {outputs} x {inputs} has no elements")
    height, width = (length or size for length, size in zip(block, (outputs, inputs), strict=True))
    fit = (-(-outputs // height), -(-inputs // width))
    # Whole blocks in order are a view of the weight, to which scales are broadcast.
    in_blocks = groups_I is None and outputs % height == inputs % width == 0

    def spread(one: Tensor) -> Tensor:
        one = one.float()
        if one.dim() < 2:
            one = one.reshape(-1, 1)  # one per tensor, or one per output
        if one.dim() > 2 or any(there not in (1, wanted) for there, wanted in zip(one.shape, fit, strict=True)):
            raise ValueError(f"expected {' x '.join(map(str, fit))} scales and zero points")
        if in_blocks:
            return one[:, None, :, None]
        columns_I = torch.arange(inputs) // width
        if groups_I is not None and one.shape[1] > 1:
            columns_I = groups_I.long()
            if len(columns_I) != inputs or columns_I.min() < 0:
                raise ValueError("expected a group for each input")
        return one.expand(fit)[:, columns_I][torch.arange(outputs) // height]

    weight_OI = torch.empty(weight_OI.shape).copy_(weight_OI)
    blocks = weight_OI.view(fit[0], height, fit[1], width) if in_blocks else weight_OI
    if zeros is not None:
        blocks.sub_(spread(zeros))
    blocks.mul_(spread(scales))
    return weight_OI
