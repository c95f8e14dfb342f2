"""Rows of random blocks in the formats of a GGUF file.

Owns: sizes of blocks, and the places of their scales.  Does not know: what the other bits mean.
"""

from random import Random

import numpy as np
import torch

from engine.kernels.blocks import Format
from engine.layers.packing import StoredRows

INT4 = tuple(one for one in Format if one >= Format.HALF32)  # of safetensors files
SIZE = {one: 256 if one.name.endswith("_K") else 32 for one in Format} | {
    one: int(one.name.removeprefix("HALF").removeprefix("UPPER")) for one in INT4
}
BYTES = {
    Format.Q4_0: 18, Format.Q4_1: 20, Format.Q5_0: 22, Format.Q5_1: 24, Format.Q8_0: 34,
    Format.Q4_K: 144, Format.Q5_K: 176, Format.Q6_K: 210, Format.MXFP4: 17, **{one: 3 + SIZE[one] // 2 for one in INT4},
}  # fmt: skip
BITS = {one: 8 * BYTES[one] // SIZE[one] for one in Format}
MINIMA = (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)  # their second 16 bits


def random_rows(dice: Random, kind: Format, outputs: int, inputs: int) -> StoredRows:
    """Blocks of random bits with scales and minima from 0.5 to 2, of either sign."""
    random = np.random.default_rng(dice.randrange(1 << 32))
    blocks = random.integers(0, 256, (outputs, inputs // SIZE[kind], BYTES[kind]), np.uint8)
    for place in [208] if kind == Format.Q6_K else [0, 2] if kind in MINIMA else [0]:
        scales = random.uniform(0.5, 2, blocks.shape[:2]) * random.choice((-1, 1), blocks.shape[:2])
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == Format.MXFP4:
        blocks[..., 0] = random.integers(125, 130, blocks.shape[:2])
        blocks[..., 1] = random.integers(0, 256, blocks.shape[:2])
    if kind in INT4:
        blocks[..., 2] = random.integers(0, 17, blocks.shape[:2])
    return StoredRows("random", kind.name, torch.from_numpy(blocks.reshape(outputs, -1)), inputs)


def int4_floats(rows: StoredRows) -> torch.Tensor:
    """The floats of a safetensors file's rows."""
    kind = Format[rows.format]
    blocks = rows.blocks.view(len(rows.blocks), -1, BYTES[kind])
    scales = blocks[..., :2].contiguous().view(torch.bfloat16 if kind >= Format.UPPER32 else torch.float16).float()
    integers = torch.cat([blocks[..., 3:] & 15, blocks[..., 3:] >> 4], -1).float()
    return ((integers - blocks[..., 2:3].float()) * scales).flatten(1)
