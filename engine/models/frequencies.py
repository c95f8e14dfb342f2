"""Rotary frequencies of a checkpoint: the plain ones, and the ways to stretch them to longer contexts.

Legend: R rotated pairs of a head, H / 2
Owns: the formulas.  Does not know: positions, rotation.
"""

import math

import torch
from torch import Tensor

from engine.checkpoints.shape import RotaryShape
from engine.layers.rotary import Rotary


def build_rotary(shape: RotaryShape, head_size: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Return the rotary embedding of heads of this size."""
    frequencies_R = frequencies(shape, shape.size or head_size).to(device)
    return Rotary(frequencies_R, shape.attention_factor, dtype, head_size=head_size, interleaved=shape.interleaved)


def frequencies(shape: RotaryShape, head_size: int) -> Tensor:
    """Return radians per position of each pair, float32 [R].  head_size: number of a head's elements that rotate."""
    exponents_R = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    plain_R = 1.0 / shape.theta**exponents_R
    if shape.kind == "linear":
        return plain_R / shape.factor
    if shape.kind == "proportional":
        return torch.where(torch.arange(len(plain_R)) < shape.turned, plain_R / shape.factor, 0.0)
    if shape.kind == "llama3":
        return _llama3(plain_R, shape)
    if shape.kind == "yarn":
        return _yarn(plain_R, shape, head_size)
    if shape.kind == "longrope":
        return 1.0 / (torch.tensor(shape.factors) * shape.theta**exponents_R)
    return plain_R


def _llama3(plain_R: Tensor, shape: RotaryShape) -> Tensor:
    """Stretch slow pairs, keep fast ones, and blend the others by their number of turns in the original context.

    Source: Llama 3.1 model card and reference code.
    """
    turns_R = shape.original_max_len * plain_R / (2 * math.pi)
    kept_R = (turns_R - shape.low_freq_factor) / (shape.high_freq_factor - shape.low_freq_factor)
    kept_R = kept_R.clamp(0, 1)
    return plain_R * (kept_R + (1 - kept_R) / shape.factor)


def _yarn(plain_R: Tensor, shape: RotaryShape, head_size: int) -> Tensor:
    """Blend as llama3 does, but linearly in the pair's index.  Source: Peng et al. 2023 (YaRN), sec. 3.2."""

    def pair_that_turns(times: float) -> float:
        wavelength = shape.original_max_len / (times * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(shape.theta))

    low, high = pair_that_turns(shape.beta_fast), pair_that_turns(shape.beta_slow)
    if shape.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    stretched_R = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain_R * (1 - stretched_R + stretched_R / shape.factor)
