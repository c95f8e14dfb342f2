"""Rows in float8 (e4m3) with a scale per row or per group of elements, as float8 products read them.

Legend: T rows · I features · G groups of a row
Owns: the arithmetic in torch.  Does not know: products, weights, the kernels of ``float8_ops.py``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-12  # in place of a largest element of 0, so that nothing is divided by 0
GROUP = 128
# Rows with scales per group come in fours: libraries want each column of scales to begin at a multiple of 16 bytes.
ROWS_MULTIPLE = 4

Rounded = tuple[Tensor, Tensor]


def num_rounded(num_rows: int, group: int) -> int:
    """Return the number of rows after rounding; the content of those after ``num_rows`` does not matter."""
    return -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE if group else num_rows


def rounded(x_TI: Tensor, group: int = 0) -> Rounded:
    """Return rows in float8, contiguous, and the float32 scales that restore their size.

    group: 0 for one scale per row, [T, 1]; else elements per scale, a divisor of I: [T, G], stored by columns.
    """
    num_rows = num_rounded(len(x_TI), group)
    if num_rows > len(x_TI):
        x_TI = F.pad(x_TI, (0, 0, 0, num_rows - len(x_TI)))
    x_TGI = x_TI.contiguous().unflatten(1, (-1, group or x_TI.shape[1]))
    largest_TG = x_TGI.abs().amax(2).float().clamp_min_(SMALLEST)
    # On a GPU, torch multiplies by the reciprocal of a divisor that is a plain number, which rounds otherwise.
    scales_TG = largest_TG / torch.full_like(largest_TG, LARGEST)
    rounded_TGI = (x_TGI / scales_TG[:, :, None]).clamp_(-LARGEST, LARGEST).to(FLOAT8)
    return rounded_TGI.flatten(1), scales_TG.t().contiguous().t() if group else scales_TG
