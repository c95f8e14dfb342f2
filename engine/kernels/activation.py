"""The gated activation of an MLP, in one launch from the merged gate and up projections.

Legend: T tokens · I intermediate features
Owns: the pass over gate and up, the formulas.  Does not know: which family uses which.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

# The names that config.json files use in ``hidden_act``.
KINDS: Final = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}
COLUMNS = 1024


def gated(gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
    """Return activation(gate) * up as [T, I], in the dtype of gate_up, computed in float32.

    gate_up_T2I: [T, 2 I], contiguous, all of gate first.  kind: silu; gelu (Hendrycks and Gimpel 2016), exact by the
    error function; or gelu_pytorch_tanh, its approximation by tanh.
    """
    num_tokens, both = gate_up_T2I.shape
    assert gate_up_T2I.is_contiguous(), "gate and up must be contiguous"
    out_TI = torch.empty((num_tokens, both // 2), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_tokens:
        block = min(COLUMNS, triton.next_power_of_2(both // 2))
        per_token = triton.cdiv(both // 2, block)
        # On one axis, since only the first axis of a grid may exceed 65,535.
        gate_columns[(num_tokens * per_token,)](
            gate_up_T2I, out_TI,
            WIDTH=both // 2, KIND=KINDS[kind], PROGRAMS=per_token, BLOCK_I=block,
            num_warps=max(1, block // 256), enable_fp_fusion=True, **launch_options(gate_up_T2I.device),
        )  # fmt: skip
    return out_TI


@triton.jit
def gate_columns(
    gate_up, out, WIDTH: tl.constexpr, KIND: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one token per program."""
    program = tl.program_id(0)
    token = (program // PROGRAMS).to(tl.int64)
    i_I = (program % PROGRAMS) * BLOCK_I + tl.arange(0, BLOCK_I)
    live_I = i_I < WIDTH
    wait_for_previous(PDL)
    let_next_begin(PDL)
    gate_I = tl.load(gate_up + token * (2 * WIDTH) + i_I, mask=live_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + i_I, mask=live_I, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i_I, (activated(gate_I, KIND) * up_I).to(out.dtype.element_ty), mask=live_I)


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """Return the activation of float32 numbers."""
    if KIND == 0:
        out = gate * tl.sigmoid(gate)
    elif KIND == 1:
        # (1 + tanh(z)) / 2 is sigmoid(2 z); the factors are 2 sqrt(2 / pi), and that times 0.044715.
        out = gate * tl.sigmoid(gate * (1.5957691216057308 + 0.07135481282553558 * gate * gate))
    else:
        out = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
    return out
