"""The recurrence of linear attention with decay, and of the delta rule, of prompts: chunks of tokens by products.

Legend: T new tokens of a step · H heads · K size of a key · V size of a value · S slots · M rows with many tokens
        N chunks · C tokens of a chunk
Owns: the order of products in a chunk, and of chunks.  Does not know: layers, which rows have a prompt.

A token's values are those that it adds to its head's matrix M whatever M is, less what it finds of the M before its
chunk; with the delta rule both follow from a triangular system in the keys of the chunk (Yang et al. 2024), which is
solved for all chunks at once.  Then a program walks through the chunks of a row with some values of a head, and has M
in registers.  Tokens of padding are zeros: they add nothing and decay nothing.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.recurrence import TokenTerms, sizes_of, softplus, unit
from engine.layers.states import Prompts, StatesOfStep

CHUNK: Final = 64
SMALLEST: Final = 16  # sides of a product
VALUES: Final = 32


def advance_prompts(
    terms: TokenTerms, matrices_SHKV: Tensor, step: StatesOfStep, prompts: Prompts, o_THV: Tensor
) -> None:
    """Write the results of the rows with many tokens to o_THV, and advance their matrices.

    prompts: of the step, in chunks of CHUNK."""
    terms.check()
    num_tokens, heads, value = o_THV.shape
    exact = terms.a_TH.dtype == torch.float32
    num_chunks = len(prompts.firsts_N)
    if not num_chunks:
        return
    block = min(VALUES, triton.next_power_of_2(value))
    options = {
        "CHUNK": CHUNK,
        "PRECISION": "ieee" if exact else "tf32",
        "enable_fp_fusion": True,
        **launch_options(o_THV.device),
    }
    found_THK = known_THV = None
    if terms.is_delta:
        found_THK = o_THV.new_empty((num_tokens, heads, terms.k_TGK.shape[2]))
        known_THV = torch.empty_like(o_THV)
        solve_chunk[(num_chunks * heads,)](
            terms.k_TGK, terms.v_THV, terms.a_TH, terms.b_TH, terms.decay_H, terms.bias_H,
            prompts.firsts_N, prompts.ends_N, found_THK, known_THV, terms.q_TGK.stride(0), terms.a_TH.stride(0),
            **sizes_of(terms, triton.next_power_of_2(value), SMALLEST), LEVELS=CHUNK.bit_length() - 1,
            FINER="ieee" if exact else "tf32x3", num_warps=8, **options,
        )  # fmt: skip
    advance_chunks[(len(prompts.many_M) * heads * triton.cdiv(value, block),)](
        terms.q_TGK, terms.k_TGK, terms.v_THV, terms.a_TH, terms.decay_H, terms.bias_H, terms.skip_H, found_THK,
        known_THV, matrices_SHKV, prompts.many_M, step.slots_B, step.fresh_B, step.starts_B1, o_THV, terms.least_step,
        terms.q_TGK.stride(0), terms.a_TH.stride(0), matrices_SHKV.stride(0),
        **sizes_of(terms, block, SMALLEST), num_warps=4, **options,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["firsts", "ends"])
def solve_chunk(
    k, v, a, b, decay, bias, firsts, ends, found, known, token_stride, gate_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, FINER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Solve the system of one head and chunk per program: what its tokens add to any matrix, and find in the one before
    the chunk."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    decay_h, bias_h = tl.load(decay + head), tl.load(bias + head)
    c_C, k_K, v_V = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    first = tl.load(firsts + chunk)
    live_C = first + c_C < tl.load(ends + chunk)
    token_C1 = (first + c_C).to(tl.int64)[:, None]
    live_CK, live_CV = live_C[:, None] & (k_K < KEY)[None, :], live_C[:, None] & (v_V < VALUE)[None, :]
    gate_C = (first + c_C).to(tl.int64) * gate_stride + head
    g_C = decay_h * softplus(tl.load(a + gate_C, mask=live_C, other=0.0).to(tl.float32) + bias_h)
    g_C = tl.cumsum(tl.where(live_C, g_C, 0.0), 0)
    b_C = tl.where(live_C, tl.sigmoid(tl.load(b + gate_C, mask=live_C, other=0.0).to(tl.float32)), 0.0)
    at_CK = token_C1 * token_stride + head // SHARED * KEY + k_K[None, :]
    key_CK = tl.load(k + at_CK, mask=live_CK, other=0.0)
    key_CK *= unit(tl.sum(key_CK * key_CK, 1))[:, None]
    scaled_CK = key_CK * b_C[:, None]
    earlier_CC = c_C[:, None] > c_C[None, :]
    decay_CC = tl.exp(tl.where(earlier_CC, g_C[:, None] - g_C[None, :], float("-inf")))
    system_CC = tl.dot(scaled_CK, tl.trans(key_CK), input_precision=PRECISION) * decay_CC
    # The inverse of 1 + system, first of single tokens, then of blocks of twice as many: what is in the lower left of
    # such a block, between the inverses of its halves, is what their own inverse lacks.
    c_C1, c_1C = c_C[:, None], c_C[None, :]
    inverse_CC = tl.where(c_C1 == c_1C, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        lower_left_CC = (c_C1 >> level + 1 == c_1C >> level + 1) & (c_C1 >> level > c_1C >> level)
        between_CC = tl.dot(inverse_CC, tl.where(lower_left_CC, system_CC, 0.0), input_precision=FINER)
        inverse_CC -= tl.dot(between_CC, inverse_CC, input_precision=FINER)
    found_CK = tl.dot(inverse_CC, scaled_CK * tl.exp(g_C)[:, None], input_precision=PRECISION)
    tl.store(found + (token_C1 * HEADS + head) * KEY + k_K[None, :], found_CK, mask=live_CK)
    value_CV = tl.load(v + token_C1 * token_stride + head * VALUE + v_V[None, :], mask=live_CV, other=0.0)
    known_CV = tl.dot(inverse_CC, value_CV * b_C[:, None], input_precision=PRECISION)
    tl.store(known + (token_C1 * HEADS + head) * VALUE + v_V[None, :], known_CV, mask=live_CV)


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "fresh", "starts"])
def advance_chunks(
    q, k, v, a, decay, bias, skip, found, known, matrices, rows, slots, fresh, starts, out, least_step, token_stride,
    gate_stride, slot_stride, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Advance some values of one head of one row per program."""
    program, blocks = tl.program_id(0), tl.cdiv(VALUE, BLOCK_V)
    place, head = program // blocks // HEADS, program // blocks % HEADS
    decay_h, bias_h = tl.load(decay + head), tl.load(bias + head)
    skip_h = 0.0 if DELTA else tl.load(skip + head)
    c_C, k_K, v_V = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), (program % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    live_K, live_V = k_K < KEY, v_V < VALUE
    wait_for_previous(PDL)
    let_next_begin(PDL)
    row = tl.load(rows + place)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    had = tl.load(fresh + row) == 0
    at_KV = matrices + slot * slot_stride + (head * KEY + k_K[:, None]) * VALUE + v_V[None, :]
    live_KV = live_K[:, None] & live_V[None, :]
    m_KV = tl.load(at_KV, mask=live_KV & had, other=0.0)
    for start in range(first, end, CHUNK):
        token_C = start + c_C
        live_C = token_C < end
        token_C1 = token_C.to(tl.int64)[:, None]
        live_CK, live_CV = live_C[:, None] & live_K[None, :], live_C[:, None] & live_V[None, :]
        at_CK = token_C1 * token_stride + head // SHARED * KEY + k_K[None, :]
        query_CK, key_CK = tl.load(q + at_CK, mask=live_CK, other=0.0), tl.load(k + at_CK, mask=live_CK, other=0.0)
        gate_C = tl.load(a + token_C.to(tl.int64) * gate_stride + head, mask=live_C, other=0.0).to(tl.float32)
        step_C = softplus(gate_C + bias_h)
        if DELTA:
            query_CK *= unit(tl.sum(query_CK * query_CK, 1))[:, None] * KEY**-0.5
            key_CK *= unit(tl.sum(key_CK * key_CK, 1))[:, None]
            at_HK = (token_C1 * HEADS + head) * KEY + k_K[None, :]
            found_CK = tl.load(found + at_HK, mask=live_CK, other=0.0)
            value_CV = tl.load(known + (token_C1 * HEADS + head) * VALUE + v_V[None, :], mask=live_CV, other=0.0)
            added_CV = value_CV - tl.dot(found_CK, m_KV, input_precision=PRECISION)
        else:
            step_C = tl.maximum(step_C, least_step)
            value_CV = tl.load(v + token_C1 * token_stride + head * VALUE + v_V[None, :], mask=live_CV, other=0.0)
            added_CV = value_CV * step_C[:, None]
        step_C = tl.where(live_C, step_C, 0.0)
        g_C = decay_h * tl.cumsum(step_C, 0)
        whole = decay_h * tl.sum(step_C, 0)
        not_later_CC = c_C[:, None] >= c_C[None, :]
        decay_CC = tl.exp(tl.where(not_later_CC, g_C[:, None] - g_C[None, :], float("-inf")))
        seen_CC = tl.dot(query_CK, tl.trans(key_CK), input_precision=PRECISION) * decay_CC
        o_CV = tl.dot(query_CK * tl.exp(g_C)[:, None], m_KV, input_precision=PRECISION)
        o_CV += tl.dot(seen_CC, added_CV, input_precision=PRECISION)
        if not DELTA:
            o_CV += skip_h * value_CV
        tl.store(out + (token_C1 * HEADS + head) * VALUE + v_V[None, :], o_CV, mask=live_CV)
        left_CK = key_CK * tl.exp(whole - g_C)[:, None]
        m_KV = m_KV * tl.exp(whole) + tl.dot(tl.trans(left_CK), added_CV, input_precision=PRECISION)
    # Every thread has read its part of the matrix before one of them writes.
    tl.debug_barrier()
    tl.store(at_KV, m_KV, mask=live_KV)
