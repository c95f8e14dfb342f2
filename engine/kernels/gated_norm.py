"""The gate and the norm behind a recurrence, in one launch.

Legend: T tokens · I values of all heads · N values of a group, over which a norm is taken · R groups of a program
Owns: their order and arithmetic.  Does not know: which layer has which order.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

VALUES: Final = 1024  # of a program, if its groups are small


def gate(
    o_TI: Tensor,
    z_TI: Tensor,
    weight: Tensor | None,
    num_groups: int,
    eps: float,
    gated_first: bool,
    kind: str = "silu",
) -> Tensor:
    """Return norm(o) * gate(z), or norm(o * gate(z)) if ``gated_first``, in z's dtype.  kind: of gate, silu or sigmoid.

    o_TI: float32, contiguous.  weight: of the norm, float32, for each of I values, or for those of each group alike;
    None if there is no norm."""
    num_tokens, width = o_TI.shape
    assert o_TI.is_contiguous(), "a recurrence writes its results without gaps"
    assert z_TI.stride(1) == 1, "gates of a token are contiguous"
    y_TI = torch.empty((num_tokens, width), dtype=z_TI.dtype, device=o_TI.device)
    group = width // num_groups
    block = triton.next_power_of_2(group)
    together = max(1, VALUES // block)
    if num_tokens:
        gate_groups[(triton.cdiv(num_tokens * num_groups, together),)](
            o_TI, z_TI, weight, y_TI, eps, z_TI.stride(0), num_tokens * num_groups,
            WIDTH=group, GROUPS=num_groups, NORMED=weight is not None,
            ALIKE=weight is not None and len(weight) == group, GATED_FIRST=gated_first, SIGMOID=kind == "sigmoid",
            BLOCK_R=together,
            BLOCK_N=block, num_warps=min(16, max(1, together * block // 256)), enable_fp_fusion=True,
            **launch_options(o_TI.device),
        )  # fmt: skip
    return y_TI


@triton.jit(do_not_specialize=["num_groups"])
def gate_groups(
    o, z, weight, out, eps, z_stride, num_groups,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, NORMED: tl.constexpr, ALIKE: tl.constexpr, GATED_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some groups per program."""
    n_1N = tl.arange(0, BLOCK_N)[None, :]
    r_R1 = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    live_RN = (r_R1 < num_groups) & (n_1N < WIDTH)
    i_RN = r_R1 % GROUPS * WIDTH + n_1N
    at_RN = r_R1.to(tl.int64) * WIDTH + n_1N
    wait_for_previous(PDL)
    let_next_begin(PDL)
    o_RN = tl.load(o + at_RN, mask=live_RN, other=0.0)
    z_RN = tl.load(z + (r_R1 // GROUPS).to(tl.int64) * z_stride + i_RN, mask=live_RN, other=0.0).to(tl.float32)
    gate_RN = tl.sigmoid(z_RN) if SIGMOID else z_RN * tl.sigmoid(z_RN)
    if GATED_FIRST:
        o_RN *= gate_RN
    if NORMED:
        mean_R1 = tl.sum(o_RN * o_RN, 1)[:, None] / WIDTH
        weight_RN = tl.load(weight + (n_1N + r_R1 * 0 if ALIKE else i_RN), mask=live_RN, other=0.0)
        o_RN *= tl.rsqrt(mean_R1 + eps) * weight_RN
    if not GATED_FIRST:
        o_RN *= gate_RN
    tl.store(out + at_RN, o_RN.to(out.dtype.element_ty), mask=live_RN)
