"""The recurrence of linear attention with decay, and of the delta rule, of prompts: chunks of tokens by products.

Legend: T new tokens of a step · H heads · K size of a key · V size of a value · S slots · M rows with many tokens
        N chunks · C tokens of a chunk
Owns: the order of products in a chunk, and of chunks.  Does not know: layers, which rows have a prompt.

A token's values are those that it adds to its head's matrix M whatever M is, less what it finds of the M before its
chunk; with the delta rule both follow from a triangular system in the keys of the chunk (Yang et al. 2024).  All that
does not depend on M is computed for all chunks at once.  Then a program walks through the chunks of a row with some
values of a head, and has M in registers.  Tokens of padding are zeros: they add nothing and decay nothing.

Factors of products are bfloat16 if the model is, else float32; sums and M are float32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.products import multiply_by
from engine.kernels.recurrence import TokenTerms, sizes_of, softplus, unit
from engine.layers.states import PromptRows, StatesOfStep

CHUNK: Final = 64
SMALLEST: Final = 16  # sides of a product
SIDE: Final = 64  # of what a program has of keys and values before it knows a matrix
VALUES: Final = 32


def advance_prompts(
    terms: TokenTerms, matrices_SHKV: Tensor, step: StatesOfStep, prompts: PromptRows, o_THV: Tensor
) -> None:
    """Write the results of the rows with many tokens to o_THV, and advance their matrices.

    prompts: of the step, in chunks of CHUNK."""
    terms.check()
    (num_tokens, heads, value), key, num_chunks = o_THV.shape, terms.k_TGK.shape[2], len(prompts.firsts_N)
    if not num_chunks:
        return
    dtype = terms.a_TH.dtype
    rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    queries_THK, keys_THK, found_THK = o_THV.new_empty((3, num_tokens, heads, key), dtype=rounded)
    seen_THC = o_THV.new_empty((num_tokens, heads, CHUNK), dtype=rounded)
    added_THV, wholes_TH = torch.empty_like(o_THV), o_THV.new_empty((num_tokens, heads))
    strides = terms.q_TGK.stride(0), terms.a_TH.stride(0)
    key_block = max(SMALLEST, triton.next_power_of_2(key))
    value_block = max(SMALLEST, min(VALUES, triton.next_power_of_2(value)))
    options = {
        "CHUNK": CHUNK,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "INTERPRETED": triton.knobs.runtime.interpret,
        "enable_fp_fusion": True,
        **launch_options(o_THV.device),
    }
    prepare_chunk[(num_chunks * heads,)](
        terms.q_TGK, terms.k_TGK, terms.v_THV, terms.a_TH, terms.b_TH, terms.decay_H, terms.bias_H, prompts.firsts_N,
        prompts.ends_N, queries_THK, keys_THK, found_THK, seen_THC, added_THV, wholes_TH, terms.least_step, terms.most,
        *strides, **sizes_of(terms, SIDE, SIDE), LEVELS=CHUNK.bit_length() - 1,
        num_warps=4 if terms.is_delta else 8, num_stages=1, **options,
    )  # fmt: skip
    # A Hopper GPU has the shared memory for the next chunk's numbers, if these are of 16 bits.
    advance_chunks[(len(prompts.many_M) * heads * triton.cdiv(value, value_block),)](
        queries_THK, keys_THK, found_THK, seen_THC, added_THV, wholes_TH, terms.v_THV, terms.skip_H, matrices_SHKV,
        prompts.many_M, step.slots_B, step.fresh_B, step.starts_B1, o_THV, strides[0], matrices_SHKV.stride(0),
        **sizes_of(terms, key_block, value_block), num_warps=8,
        num_stages=2 if options["PDL"] and rounded.itemsize == 2 else 1, **options,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["firsts", "ends"])
def prepare_chunk(
    q, k, v, a, b, decay, bias, firsts, ends, queries, keys, found, seen, added, wholes, least_step, most, token_stride,
    gate_stride, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute what does not depend on the matrix before a chunk, for one chunk and head per program."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    decay_h, bias_h = tl.load(decay + head), tl.load(bias + head)
    c_C, from_1K, from_1V = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    rounded = queries.dtype.element_ty
    wait_for_previous(PDL)
    let_next_begin(PDL)
    first = tl.load(firsts + chunk)
    live_C = first + c_C < tl.load(ends + chunk)
    # Where the first token's numbers are; those of the others follow from distances that are small.
    token, result = first.to(tl.int64), first.to(tl.int64) * HEADS + head
    q += token * token_stride + head // SHARED * KEY
    k += token * token_stride + head // SHARED * KEY
    v += token * token_stride + head * VALUE
    queries += result * KEY
    keys += result * KEY
    found += result * KEY
    seen += result * CHUNK
    added += result * VALUE
    from_C1, to_C1 = (c_C * token_stride)[:, None], (c_C * HEADS)[:, None]
    gate_C = token * gate_stride + head + c_C * gate_stride
    step_C = softplus(tl.load(a + gate_C, mask=live_C, other=0.0).to(tl.float32) + bias_h)
    if not DELTA:
        step_C = tl.maximum(step_C, least_step, propagate_nan=tl.PropagateNan.ALL)
    step_C = tl.where(live_C, step_C, 0.0)
    g_C, whole = decay_h * tl.cumsum(step_C, 0), decay_h * tl.sum(step_C, 0)
    tl.store(wholes + result, tl.exp(whole))
    length_C, key_length_C = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    if DELTA:
        for start in range(0, KEY, BLOCK_K):
            k_1K = start + from_1K
            live_CK = live_C[:, None] & (k_1K < KEY)
            query_CK = tl.load(q + from_C1 + k_1K, mask=live_CK, other=0.0)
            key_CK = tl.load(k + from_C1 + k_1K, mask=live_CK, other=0.0)
            length_C += tl.sum(query_CK * query_CK, 1)
            key_length_C += tl.sum(key_CK * key_CK, 1)
    query_C = unit(length_C) * KEY**-0.5 if DELTA else length_C + 1.0
    key_C = unit(key_length_C) if DELTA else key_length_C + 1.0
    seen_CC, same_CC = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, KEY, BLOCK_K):
        k_1K = start + from_1K
        live_CK = live_C[:, None] & (k_1K < KEY)
        query_CK = tl.load(q + from_C1 + k_1K, mask=live_CK, other=0.0) * query_C[:, None]
        key_CK = tl.load(k + from_C1 + k_1K, mask=live_CK, other=0.0) * key_C[:, None]
        aged_CK, kept_CK = query_CK * tl.exp(g_C)[:, None], key_CK * tl.exp(whole - g_C)[:, None]
        tl.store(queries + to_C1 * KEY + k_1K, aged_CK.to(rounded), mask=live_CK)
        tl.store(keys + to_C1 * KEY + k_1K, kept_CK.to(rounded), mask=live_CK)
        key_KC = tl.trans(key_CK.to(rounded))
        seen_CC = multiply_by(query_CK.to(rounded), key_KC, seen_CC, INTERPRETED, PRECISION)
        if DELTA:
            same_CC = multiply_by(key_CK.to(rounded), key_KC, same_CC, INTERPRETED, PRECISION)
    difference_CC = tl.where(c_C[:, None] >= c_C[None, :], g_C[:, None] - g_C[None, :], float("-inf"))
    seen_CC *= tl.exp(difference_CC)
    tl.store(seen + to_C1 * CHUNK + c_C[None, :], seen_CC.to(rounded), mask=live_C[:, None])
    if DELTA:
        b_C = most * tl.sigmoid(tl.load(b + gate_C, mask=live_C, other=0.0).to(tl.float32))
        factor_C = -key_C * b_C * tl.exp(g_C)
        inverse_CC = inverse(same_CC * tl.exp(difference_CC) * b_C[:, None], CHUNK, LEVELS, PRECISION).to(rounded)
        for start in range(0, KEY, BLOCK_K):
            k_1K = start + from_1K
            live_CK = live_C[:, None] & (k_1K < KEY)
            key_CK = tl.load(k + from_C1 + k_1K, mask=live_CK, other=0.0) * factor_C[:, None]
            found_CK = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            found_CK = multiply_by(inverse_CC, key_CK.to(rounded), found_CK, INTERPRETED, PRECISION)
            tl.store(found + to_C1 * KEY + k_1K, found_CK.to(rounded), mask=live_CK)
        for start in range(0, VALUE, BLOCK_V):
            v_1V = start + from_1V
            live_CV = live_C[:, None] & (v_1V < VALUE)
            value_CV = tl.load(v + from_C1 + v_1V, mask=live_CV, other=0.0) * b_C[:, None]
            added_CV = tl.zeros([CHUNK, BLOCK_V], tl.float32)
            added_CV = multiply_by(inverse_CC, value_CV.to(rounded), added_CV, INTERPRETED, PRECISION)
            tl.store(added + to_C1 * VALUE + v_1V, added_CV, mask=live_CV)
    else:
        for start in range(0, VALUE, BLOCK_V):
            v_1V = start + from_1V
            live_CV = live_C[:, None] & (v_1V < VALUE)
            value_CV = tl.load(v + from_C1 + v_1V, mask=live_CV, other=0.0)
            tl.store(added + to_C1 * VALUE + v_1V, value_CV * step_C[:, None], mask=live_CV)


@triton.jit
def inverse(system_CC, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + the system's lower left, without its diagonal.

    Of single tokens it is 1.  Then of blocks of twice as many: what is in the lower left of such a block, between the
    inverses of its halves, is what their own inverse lacks."""
    c_C1, c_1C = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse_CC = tl.where(c_C1 == c_1C, 1.0, 0.0)
    for level in range(LEVELS):
        lower_left_CC = (c_C1 >> level + 1 == c_1C >> level + 1) & (c_C1 >> level > c_1C >> level)
        between_CC = tl.dot(inverse_CC, tl.where(lower_left_CC, system_CC, 0.0), input_precision=PRECISION)
        inverse_CC -= tl.dot(between_CC, inverse_CC, input_precision=PRECISION)
    return inverse_CC


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "fresh", "starts"])
def advance_chunks(
    queries, keys, found, seen, added, wholes, v, skip, matrices, rows, slots, fresh, starts, out, token_stride,
    slot_stride, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advance some values of one head of one row per program."""
    program, blocks = tl.program_id(0), tl.cdiv(VALUE, BLOCK_V)
    place, head = program // blocks // HEADS, program // blocks % HEADS
    skip_h = 0.0 if DELTA else tl.load(skip + head)
    c_C, k_K = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v_V = (program % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    live_K, live_V = k_K < KEY, v_V < VALUE
    wait_for_previous(PDL)
    let_next_begin(PDL)
    row = tl.load(rows + place)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    had = tl.load(fresh + row) == 0
    at_KV = matrices + tl.load(slots + row).to(tl.int64) * slot_stride
    at_KV += (head * KEY + k_K[:, None]) * VALUE + v_V[None, :]
    live_KV = live_K[:, None] & live_V[None, :]
    m_KV = tl.load(at_KV, mask=live_KV & had, other=0.0)
    rounded = queries.dtype.element_ty
    result, at_CV = first.to(tl.int64) * HEADS + head, c_C[:, None] * token_stride + v_V[None, :]
    queries += result * KEY
    keys += result * KEY
    found += result * KEY
    seen += result * CHUNK
    added += result * VALUE
    out += result * VALUE
    wholes += result
    v += first.to(tl.int64) * token_stride + head * VALUE
    to_C1 = (c_C * HEADS)[:, None]
    to_CK, to_CV, to_CC = to_C1 * KEY + k_K[None, :], to_C1 * VALUE + v_V[None, :], to_C1 * CHUNK + c_C[None, :]
    for start in range(first, end, CHUNK):
        live_C1 = (start + c_C < end)[:, None]
        live_CK, live_CV = live_C1 & live_K[None, :], live_C1 & live_V[None, :]
        added_CV = tl.load(added + to_CV, mask=live_CV, other=0.0)
        before_KV = m_KV.to(rounded)
        if DELTA:
            found_CK = tl.load(found + to_CK, mask=live_CK, other=0.0)
            added_CV = multiply_by(found_CK, before_KV, added_CV, INTERPRETED, PRECISION)
        added_CV = added_CV.to(rounded)
        query_CK = tl.load(queries + to_CK, mask=live_CK, other=0.0)
        o_CV = multiply_by(query_CK, before_KV, tl.zeros([CHUNK, BLOCK_V], tl.float32), INTERPRETED, PRECISION)
        seen_CC = tl.load(seen + to_CC, mask=live_C1, other=0.0)
        o_CV = multiply_by(seen_CC, added_CV, o_CV, INTERPRETED, PRECISION)
        if not DELTA:
            o_CV += skip_h * tl.load(v + at_CV, mask=live_CV, other=0.0)
        tl.store(out + to_CV, o_CV, mask=live_CV)
        m_KV *= tl.load(wholes)
        keys_KC = tl.trans(tl.load(keys + to_CK, mask=live_CK, other=0.0))
        m_KV = multiply_by(keys_KC, added_CV, m_KV, INTERPRETED, PRECISION)
        queries += CHUNK * HEADS * KEY
        keys += CHUNK * HEADS * KEY
        found += CHUNK * HEADS * KEY
        seen += CHUNK * HEADS * CHUNK
        added += CHUNK * HEADS * VALUE
        out += CHUNK * HEADS * VALUE
        wholes += CHUNK * HEADS
        v += CHUNK * token_stride
    # Every thread has read its part of the matrix before one of them writes.
    tl.debug_barrier()
    tl.store(at_KV, m_KV, mask=live_KV)
