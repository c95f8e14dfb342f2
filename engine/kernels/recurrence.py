"""The recurrence of linear attention with decay, and of the delta rule, token after token.

Legend: T new tokens of a step · G heads with a key · H heads with a value · K size of a key · V size of a value
        S slots · B rows of the step
Owns: the recurrence of a few tokens, the terms that a token has in it.  Does not know: layers, long prompts.

A program has some values of one head of one row.  It reads their part of the head's matrix once, advances it by the
row's new tokens in registers, and writes it where it was: the rest is small beside that.  A token has the same bits
alone and behind others.
"""

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.layers.states import StatesOfStep

VALUES: Final = 32  # a cache line of a matrix


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The numbers of each token from which a recurrence follows.

    q_TGK, k_TGK, v_THV: float32, with the same distance from token to token; a head's numbers are contiguous.
    a_TH: before bias and softplus, which give the step size.  decay_H, bias_H: float32.
    b_TH: before the sigmoid, times ``most``; with it the delta rule is computed, of queries and keys of length 1.
    skip_H: otherwise, the share of a token's value in its own result, and ``least_step``, of the step size."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    a_TH: Tensor
    decay_H: Tensor
    bias_H: Tensor
    b_TH: Tensor | None = None
    most: float = 1.0
    skip_H: Tensor | None = None
    least_step: float = 0.0

    @property
    def is_delta(self) -> bool:
        """Whether these are terms of the delta rule."""
        return self.b_TH is not None

    def check(self) -> None:
        """Raise AssertionError for tensors that kernels would read wrongly."""
        assert (self.b_TH is None) != (self.skip_H is None), "a recurrence has factors of the delta rule, or skips"
        for one in (self.q_TGK, self.k_TGK, self.v_THV):
            assert one[0].is_contiguous(), "numbers of a token are contiguous"
        if self.b_TH is not None:
            assert self.a_TH.stride() == self.b_TH.stride(), "gates of a token are parts of one product"
        if len(self.q_TGK) > 1:
            assert self.q_TGK.stride(0) == self.k_TGK.stride(0) == self.v_THV.stride(0), "tokens lie side by side"


def advance_rows(terms: TokenTerms, matrices_SHKV: Tensor, step: StatesOfStep, rows: Tensor | None) -> Tensor:
    """Return o_THV, float32, and advance the matrices, float32.

    rows: those of the step to advance; None for all.  The results of the others are not written."""
    terms.check()
    num_tokens, heads, value = terms.v_THV.shape
    o_THV = terms.v_THV.new_empty((num_tokens, heads, value))
    num_rows = step.num_rows if rows is None else len(rows)
    block = min(VALUES, triton.next_power_of_2(value))
    if num_rows:
        advance_head[(num_rows * heads * triton.cdiv(value, block),)](
            terms.q_TGK, terms.k_TGK, terms.v_THV, terms.a_TH, terms.b_TH, terms.decay_H, terms.bias_H, terms.skip_H,
            matrices_SHKV, rows, step.slots_B, step.fresh_B, step.starts_B1, o_THV, terms.least_step, terms.most,
            terms.q_TGK.stride(0), terms.a_TH.stride(0), matrices_SHKV.stride(0),
            LISTED=rows is not None, **sizes_of(terms, triton.next_power_of_2(terms.k_TGK.shape[2]), block),
            num_warps=4, enable_fp_fusion=True, **launch_options(o_THV.device),
        )  # fmt: skip
    return o_THV


def sizes_of(terms: TokenTerms, key_block: int, value_block: int) -> dict[str, int]:
    """Return the constants of a kernel of these terms, with so many numbers of a key and of a value at once."""
    (_, heads, value), (_, keys, key) = terms.v_THV.shape, terms.k_TGK.shape
    return {
        "HEADS": heads,
        "SHARED": heads // keys,
        "KEY": key,
        "VALUE": value,
        "DELTA": terms.is_delta,
        "BLOCK_K": key_block,
        "BLOCK_V": value_block,
    }


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "fresh", "starts"])
def advance_head(
    q, k, v, a, b, decay, bias, skip, matrices, rows, slots, fresh, starts, out, least_step, most, token_stride,
    gate_stride, slot_stride, LISTED: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advance some values of one head of one row per program."""
    program, blocks = tl.program_id(0), tl.cdiv(VALUE, BLOCK_V)
    place, head = program // blocks // HEADS, program // blocks % HEADS
    k_K, v_V = tl.arange(0, BLOCK_K), (program % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    live_K, live_V = k_K < KEY, v_V < VALUE
    decay_h, bias_h = tl.load(decay + head), tl.load(bias + head)
    skip_h = 0.0 if DELTA else tl.load(skip + head)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    row = tl.load(rows + place) if LISTED else place
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    had = tl.load(fresh + row) == 0
    at_KV = matrices + slot * slot_stride + (head * KEY + k_K[:, None]) * VALUE + v_V[None, :]
    live_KV = live_K[:, None] & live_V[None, :]
    m_KV = tl.load(at_KV, mask=live_KV & had, other=0.0)
    key_K = first.to(tl.int64) * token_stride + head // SHARED * KEY + k_K
    value_V = first.to(tl.int64) * token_stride + head * VALUE + v_V
    gate, out_V = first.to(tl.int64) * gate_stride + head, (first.to(tl.int64) * HEADS + head) * VALUE + v_V
    for _ in range(first, end):
        q_K, kk_K = tl.load(q + key_K, mask=live_K, other=0.0), tl.load(k + key_K, mask=live_K, other=0.0)
        x_V = tl.load(v + value_V, mask=live_V, other=0.0)
        step = softplus(tl.load(a + gate).to(tl.float32) + bias_h)
        if DELTA:
            q_K *= unit(tl.sum(q_K * q_K)) * KEY**-0.5
            kk_K *= unit(tl.sum(kk_K * kk_K))
            m_KV *= tl.exp(decay_h * step)
            known_V = tl.sum(m_KV * kk_K[:, None], 0)
            added_V = (x_V - known_V) * (most * tl.sigmoid(tl.load(b + gate).to(tl.float32)))
        else:
            step = tl.maximum(step, least_step, propagate_nan=tl.PropagateNan.ALL)
            m_KV *= tl.exp(decay_h * step)
            added_V = x_V * step
        m_KV += kk_K[:, None] * added_V[None, :]
        o_V = tl.sum(m_KV * q_K[:, None], 0)
        if not DELTA:
            o_V += skip_h * x_V
        tl.store(out + out_V, o_V, mask=live_V)
        key_K += token_stride
        value_V += token_stride
        gate += gate_stride
        out_V += HEADS * VALUE
    # Every thread has read its part of the matrix before one of them writes.
    tl.debug_barrier()
    tl.store(at_KV, m_KV, mask=live_KV)


@triton.jit
def unit(squares):
    """Return the factors that make vectors of these squared lengths have length 1, as ``engine/layers/gated_delta.py``
    makes them."""
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), in float32, also where that is small: step sizes of many tokens are added up."""
    y = tl.exp(-tl.abs(x))
    # log(1 + y) is 2 atanh(z), as a series of z; y is at most 1, and z at most 1 / 3.
    z = y / (2.0 + y)
    s = z * z
    series = 1.0 + s * (0.3333333333 + s * (0.2 + s * (0.1428571429 + s * (0.1111111111 + s * (0.0909090909 + s * (
        0.0769230769 + s * (0.0666666667 + s * 0.0588235294)))))))  # fmt: skip
    return tl.maximum(x, 0.0) + 2.0 * z * series
