"""The step from the merged projection to attention, in one launch: norm and rotation of heads, storing keys and values.

Legend: T tokens · A query, key and value heads · Q query heads · G KV heads · S slots of the pool · H head size
        R rotated pairs of a head, H / 2 · P heads of a program
Owns: the pass over qkv.  Does not know: layers, pages, what reads the slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

HEADS_OF_A_PROGRAM = 8  # 2 KB as heads of 128 bfloat16 numbers: 16 bytes for each of 64 threads, twice


def rotate_and_store(
    qkv_TAH: Tensor,
    weight_QGH: Tensor | None,
    eps: float,
    angles_TH: Tensor,
    keys_SGH: Tensor,
    values_SGH: Tensor,
    slots_T: Tensor,
    limit: float = 0.0,
) -> Tensor:
    """Return queries as q_TQH, contiguous; store keys and values to their slots.

    qkv_TAH: contiguous, A = Q + 2 G.
    weight_QGH: [Q + G, H], the norm's weight of each query and key head; None if heads are not normalised.
    angles_TH: from ``angle_table``.  slots_T: int64; a token with a negative slot stores nothing.
    keys_SGH, values_SGH: one layer of the pool, contiguous; their type may be narrower than qkv's.
    limit: largest number of that type, to which larger ones are clamped; 0 to store all as is.
    Arithmetic is float32 and rounded once: for bfloat16, closer to the definition than a rounding per operation.
    """
    num_tokens, num_heads, head_size = qkv_TAH.shape
    num_keys = keys_SGH.shape[1]
    num_queries = num_heads - 2 * num_keys
    assert qkv_TAH.is_contiguous(), "qkv must be contiguous"
    assert keys_SGH.is_contiguous(), "slots must be contiguous"
    assert angles_TH.shape == (num_tokens, head_size), f"angles {angles_TH.shape} are not for {qkv_TAH.shape}"
    q_TQH = torch.empty((num_tokens, num_queries, head_size), dtype=qkv_TAH.dtype, device=qkv_TAH.device)
    if num_tokens:
        per_token = triton.cdiv(num_heads, HEADS_OF_A_PROGRAM)
        rotate_heads[(num_tokens * per_token,)](
            qkv_TAH, qkv_TAH if weight_QGH is None else weight_QGH, angles_TH, slots_T,
            q_TQH, keys_SGH, values_SGH, eps,
            QUERIES=num_queries, KEYS=num_keys, HALF=head_size // 2, NORMALISED=weight_QGH is not None, LIMIT=limit,
            PROGRAMS=per_token, BLOCK_P=HEADS_OF_A_PROGRAM, BLOCK_R=triton.next_power_of_2(head_size // 2),
            num_warps=2, enable_fp_fusion=True, **launch_options(qkv_TAH.device),
        )  # fmt: skip
    return q_TQH


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_heads(
    qkv, weight, angles, slots, q_out, keys, values, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, NORMALISED: tl.constexpr, LIMIT: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process some heads of one token per program; they may be of all three kinds."""
    program = tl.program_id(0)
    token = (program // PROGRAMS).to(tl.int64)
    head_P = (program % PROGRAMS) * BLOCK_P + tl.arange(0, BLOCK_P)
    r_R = tl.arange(0, BLOCK_R)
    live_PR = (head_P < QUERIES + 2 * KEYS)[:, None] & (r_R < HALF)[None, :]
    place_PR = head_P[:, None] * (2 * HALF) + r_R[None, :]
    turned_P1 = (head_P < QUERIES + KEYS)[:, None]
    of_token = qkv + token * ((QUERIES + 2 * KEYS) * 2 * HALF)
    if NORMALISED:
        weighted_PR = live_PR & turned_P1
        first_weight_PR = tl.load(weight + place_PR, mask=weighted_PR, other=0.0).to(tl.float32)
        second_weight_PR = tl.load(weight + HALF + place_PR, mask=weighted_PR, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    first_PR = tl.load(of_token + place_PR, mask=live_PR, other=0.0).to(tl.float32)
    second_PR = tl.load(of_token + HALF + place_PR, mask=live_PR, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)

    x_PR, y_PR = first_PR, second_PR
    if NORMALISED:
        squares_P = tl.sum(first_PR * first_PR, 1) + tl.sum(second_PR * second_PR, 1)
        scale_P1 = tl.rsqrt(squares_P / (2 * HALF) + eps)[:, None]
        x_PR *= scale_P1 * first_weight_PR
        y_PR *= scale_P1 * second_weight_PR
    of_angles = angles + token * (2 * HALF) + r_R
    cos_1R = tl.load(of_angles, mask=r_R < HALF, other=0.0)[None, :]
    sin_1R = tl.load(of_angles + HALF, mask=r_R < HALF, other=0.0)[None, :]
    # A value head passes through unchanged, whatever the other branch computes.
    first_PR = tl.where(turned_P1, x_PR * cos_1R - y_PR * sin_1R, first_PR)
    second_PR = tl.where(turned_P1, y_PR * cos_1R + x_PR * sin_1R, second_PR)

    first_PR = first_PR.to(q_out.dtype.element_ty)
    second_PR = second_PR.to(q_out.dtype.element_ty)
    is_query_PR = live_PR & (head_P < QUERIES)[:, None]
    queries = q_out + token * (QUERIES * 2 * HALF)
    tl.store(queries + place_PR, first_PR, mask=is_query_PR)
    tl.store(queries + HALF + place_PR, second_PR, mask=is_query_PR)
    if LIMIT > 0:
        first_PR = tl.where(first_PR > LIMIT, LIMIT, tl.where(first_PR < -LIMIT, -LIMIT, first_PR))  # NaN stays NaN
        second_PR = tl.where(second_PR > LIMIT, LIMIT, tl.where(second_PR < -LIMIT, -LIMIT, second_PR))
    last_stored = tl.where(slot >= 0, QUERIES + 2 * KEYS, 0)
    stored_PR = live_PR & (head_P < last_stored)[:, None]
    is_key_PR = stored_PR & turned_P1 & (head_P >= QUERIES)[:, None]
    of_slot = slot * (KEYS * 2 * HALF) - QUERIES * 2 * HALF
    tl.store(keys + of_slot + place_PR, first_PR.to(keys.dtype.element_ty), mask=is_key_PR)
    tl.store(keys + of_slot + HALF + place_PR, second_PR.to(keys.dtype.element_ty), mask=is_key_PR)
    is_value_PR = stored_PR & (head_P >= QUERIES + KEYS)[:, None]
    of_slot -= KEYS * 2 * HALF
    tl.store(values + of_slot + place_PR, first_PR.to(values.dtype.element_ty), mask=is_value_PR)
    tl.store(values + of_slot + HALF + place_PR, second_PR.to(values.dtype.element_ty), mask=is_value_PR)
