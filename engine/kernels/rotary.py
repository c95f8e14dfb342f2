"""Cosines and sines of a step's positions, made in one launch and read by every layer.

Legend: T tokens · R rotated pairs of a head, H / 2 · H head size
Owns: the table of a step.  Does not know: rotation, how frequencies are chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous


def angle_table(positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
    """Return angles_TH, float32: R cosines, then R sines, of position * frequency, multiplied by ``scale``.

    positions_T: int64.  frequencies_R: float32.  The product is rounded to float32 as torch rounds it.
    """
    (num_tokens,), (half,) = positions_T.shape, frequencies_R.shape
    angles_TH = torch.empty((num_tokens, 2 * half), dtype=torch.float32, device=positions_T.device)
    if num_tokens:
        tabulate_angles[(num_tokens,)](
            positions_T, frequencies_R, angles_TH, scale,
            HALF=half, BLOCK_R=triton.next_power_of_2(half),
            num_warps=1, enable_fp_fusion=True, **launch_options(positions_T.device),
        )  # fmt: skip
    return angles_TH


# A packed upload puts a step's positions at changing addresses: their alignment must not make variants.
@triton.jit(do_not_specialize_on_alignment=["positions"])
def tabulate_angles(positions, frequencies, out, scale, HALF: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Process one token per program."""
    token = tl.program_id(0).to(tl.int64)
    r_R = tl.arange(0, BLOCK_R)
    live_R = r_R < HALF
    wait_for_previous(PDL)
    let_next_begin(PDL)
    position = tl.load(positions + token).to(tl.float32)
    angle_R = position * tl.load(frequencies + r_R, mask=live_R, other=0.0)
    at = out + token * (2 * HALF)
    tl.store(at + r_R, tl.cos(angle_R) * scale, mask=live_R)
    tl.store(at + HALF + r_R, tl.sin(angle_R) * scale, mask=live_R)
