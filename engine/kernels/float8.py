"""Rows in float8 (e4m3), with a scale for each row or for each group of its elements: what products in float8 read.

Legend: T rows · I features · G groups of a row
Owns: the arithmetic in torch.  Does not know: products, weights, who else rounds on a device: ``float8_ops.py`` does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-12  # instead of 0 where all elements are, so that nothing is divided by it
GROUP = 128
# Rows with scales of groups come in fours: libraries want each column of such scales to begin at 16 bytes.
ROWS_MULTIPLE = 4

Rounded = tuple[Tensor, Tensor]


def num_rounded(num_rows: int, group: int) -> int:
    """How many rows there are after rounding; what is in those beyond ``num_rows`` does not matter."""
    return -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE if group else num_rows


def rounded(x_TI: Tensor, group: int = 0) -> Rounded:
    """Rows in float8, without gaps, and the float32 scales that give each its size back.

    group: 0 for one scale per row, [T, 1]; else one for so many elements, [T, G], column by column, I a multiple of it.
    """
    num_rows = num_rounded(len(x_TI), group)
    if num_rows > len(x_TI):
        x_TI = F.pad(x_TI, (0, 0, 0, num_rows - len(x_TI)))
    x_TGI = x_TI.contiguous().unflatten(1, (-1, group or x_TI.shape[1]))
    scales_TG = x_TGI.abs().amax(2).float().clamp_min_(SMALLEST).div_(LARGEST)
    rounded_TGI = (x_TGI / scales_TG[:, :, None]).clamp_(-LARGEST, LARGEST).to(FLOAT8)
    return rounded_TGI.flatten(1), scales_TG.t().contiguous().t() if group else scales_TG
