"""Weights in float8 (e4m3) with a scale per block of 128 x 128, from weights in floats.

Legend: O outputs · I inputs · B blocks of outputs · C blocks of inputs
Owns: the choice of scales.  Does not know: products, files.

A block that was rounded so is restored with all its elements, as no other scale than its own fits all of them as well;
the scale is as near as the bfloat16 weights allow, which is nearer than these are to the file's values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.float8 import FLOAT8, GROUP, LARGEST, SMALLEST

ROWS_AT_ONCE = 16 * GROUP  # rows of a weight rounded at a time, to bound temporary memory
# Candidates for the largest element of a block: one of each mantissa, with the largest exponent.
TOPS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
PLACES = (1, 3)  # the dimensions within a block
SAMPLED = 8  # the largest element is chosen by every eighth row of a block


def in_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements in float8, [O, I], and the float32 scales [B, C] that are nearest to the weight."""
    outputs, inputs = weight_OI.shape
    elements_OI = torch.empty((outputs, inputs), dtype=FLOAT8, device=weight_OI.device)
    scales = []
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows_OI = weight_OI[first : first + ROWS_AT_ONCE].float()
        padded_OI = F.pad(rows_OI, (0, 0, 0, -len(rows_OI) % GROUP))
        found_BOCI, scales_BC = _nearest(padded_OI.view(-1, GROUP, inputs // GROUP, GROUP))
        elements_OI[first : first + ROWS_AT_ONCE] = found_BOCI.view(-1, inputs)[: len(rows_OI)].to(FLOAT8)
        scales.append(scales_BC)
    return elements_OI, torch.cat(scales)


def _nearest(weight_BOCI: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's elements, still in float32, and scale [B, C], for the candidate with the least error."""
    largest = weight_BOCI.abs().amax(PLACES, keepdim=True).clamp_min_(SMALLEST)
    sample = weight_BOCI[:, ::SAMPLED]
    least, scales = torch.full_like(largest, torch.inf), largest / LARGEST
    for top in TOPS:
        scale = largest / top
        found, fit = _fitted(sample / scale)
        error = (sample / scale - found * fit).square_().sum(PLACES, keepdim=True) / top**2
        better = error < least
        least, scales = torch.where(better, error, least), torch.where(better, scale, scales)
    found, fit = _fitted(weight_BOCI / scales)
    return found, (scales * fit)[:, 0, :, 0]


def _fitted(wanted_BOCI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements, and the factor [B, 1, C, 1] that brings them nearest to the wanted values.

    All elements determine the factor better than the largest one alone."""
    found = wanted_BOCI.clamp(-LARGEST, LARGEST).to(FLOAT8).float()
    squares = found.square().sum(PLACES, keepdim=True).clamp_min_(1.0)
    return found, (wanted_BOCI * found).sum(PLACES, keepdim=True) / squares
