"""Blocks of rounded numbers of GGUF files, decoded to float32 with torch.

Legend: N blocks · G groups of a block that have a scale each · E numbers of a group
Owns: how each kind of block is laid out.  Does not know: files, tensors.
The products and sums are those of ggml's reference, in its order, so they have the same bits.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 21  # bytes decoded at once: several copies of them as floats fit the cache
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


def decode(rows: Tensor, kind: str) -> Tensor:
    """Return rows of blocks, given as bytes, as rows of float32.  Raises KeyError if the kind is not decoded here."""
    if kind in PLAIN:
        return rows.view(PLAIN[kind]).to(torch.float32)
    block_bytes, decoder = DECODERS[kind]
    blocks = rows.reshape(-1, block_bytes)
    parts = [decoder(part).flatten(1) for part in blocks.split(CHUNK // block_bytes)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(rows.shape[0], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a place of each block, as float32 of shape N1."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Return small integers: of each ``width`` bytes first the lowest bits of all, then the next ones."""
    count = 8 // bits
    runs = packed.reshape(packed.shape[0], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, count, 1)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return the highest bits of 32 numbers of five bits, at their place."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((blocks[:, start : start + 4, None] >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _grouped(scale_NG: Tensor, numbers: Tensor, offset_NG: Tensor | None = None) -> Tensor:
    """Return numbers times their groups' scales, less the groups' offsets."""
    numbers_NGE = numbers.float().view(*scale_NG.shape, -1)
    product = scale_NG[..., None] * numbers_NGE
    return product if offset_NG is None else product - offset_NG[..., None]


def _q2_k(blocks: Tensor) -> Tensor:
    scales, numbers = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
    return _grouped(_half(blocks, 80) * (scales & 15).float(), numbers, _half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = (low | (high << 4)).float() - 32
    # The high bit is stored inverted.
    numbers = _fields(blocks[:, 32:96], 2, 32).float() - 4 * (1 - _fields(blocks[:, :32], 1, 32).float())
    return _grouped(_half(blocks, 108) * scales, numbers)


def _scales_of_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight offsets from twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    offsets = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return scales.float(), offsets.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, offsets = _scales_of_six_bits(blocks[:, 4:16])
    return _grouped(_half(blocks, 0) * scales, _fields(blocks[:, 16:], 4, 32), _half(blocks, 2) * offsets)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, offsets = _scales_of_six_bits(blocks[:, 4:16])
    numbers = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _grouped(_half(blocks, 0) * scales, numbers, _half(blocks, 2) * offsets)


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _grouped(_half(blocks, 208) * scales, numbers.float() - 32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _levels(IQ4_LEVELS, blocks[:, 2:])


def _iq4_xs(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1)
    low = _fields(blocks[:, 4:8], 4, 1)
    scales = (low | (high << 4)).float() - 32
    return _grouped(_half(blocks, 0) * scales, _levels(IQ4_LEVELS, blocks[:, 8:]))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    # Half of 2^(e - 127), as levels are doubled; the two smallest are below float32's normal numbers.
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return bits.view(torch.float32) * _levels(FP4_LEVELS, blocks[:, 1:])


def _levels(levels: tuple[int, ...], packed: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32)[_fields(packed, 4, 16).int()]


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# Kind -> bytes of a block, and what decodes blocks.
DECODERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl), "IQ4_XS": (136, _iq4_xs), "MXFP4": (17, _mxfp4),
}  # fmt: skip
