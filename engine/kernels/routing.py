"""The choice of each token's experts in one launch, where torch needs three to twelve.

Legend: T tokens · E experts · K experts of a token · G groups of experts · S experts of a group
Owns: the choice and its weights, from the scores.  Does not know: the product that gives the scores, experts' weights.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.checkpoints.shape import RouterShape

LEAST: Final = tl.constexpr(-3.0e38)  # below every score, above experts that are not there or are chosen already


def choose_experts(
    scores_TE: Tensor, correction_E: Tensor | None, num_chosen: int, shape: RouterShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return weights_TK in ``dtype``, and experts_TK, int64, distinct for a token, the best first.

    scores: contiguous, any floating-point dtype; all else is computed in float32.  Of equal experts the first is taken.
    """
    num_tokens, num_experts = scores_TE.shape
    assert scores_TE.is_contiguous(), f"scores of shape {tuple(scores_TE.shape)} are not contiguous"
    assert num_experts % shape.num_groups == 0, f"{num_experts} experts are no {shape.num_groups} equal groups"
    weights_TK = torch.empty((num_tokens, num_chosen), dtype=dtype, device=scores_TE.device)
    experts_TK = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=scores_TE.device)
    if num_tokens:
        in_group = num_experts // shape.num_groups
        choose_for_token[(num_tokens,)](
            scores_TE, correction_E, weights_TK, experts_TK, shape.scale,
            NUM_CHOSEN=num_chosen, GROUPS=shape.num_groups, IN_GROUP=in_group, BEST_GROUPS=shape.num_chosen_groups,
            SOFTMAX=shape.scoring == "softmax", BY_SCORES=shape.by_scores, CORRECTED=shape.corrected,
            NORMALISED=shape.normalised, BLOCK_G=triton.next_power_of_2(shape.num_groups),
            BLOCK_S=triton.next_power_of_2(in_group), BLOCK_K=triton.next_power_of_2(num_chosen),
            num_warps=max(1, triton.next_power_of_2(num_experts) // 256), enable_fp_fusion=True,
        )  # fmt: skip
    return weights_TK, experts_TK


@triton.jit
def choose_for_token(
    scores, correction, weights, experts, scale,
    NUM_CHOSEN: tl.constexpr, GROUPS: tl.constexpr, IN_GROUP: tl.constexpr, BEST_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, BY_SCORES: tl.constexpr, CORRECTED: tl.constexpr, NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Process one token per program."""
    token = tl.program_id(0).to(tl.int64)
    g_G = tl.arange(0, BLOCK_G)
    s_S = tl.arange(0, BLOCK_S)
    number_GS = g_G[:, None] * IN_GROUP + s_S[None, :]
    live_GS = (g_G < GROUPS)[:, None] & (s_S < IN_GROUP)[None, :]
    score_GS = tl.load(scores + token * (GROUPS * IN_GROUP) + number_GS, mask=live_GS, other=0.0).to(tl.float32)
    if not BY_SCORES:  # else the weights follow from the scores of the chosen alone
        if SOFTMAX:
            power_GS = tl.where(live_GS, tl.exp(score_GS - tl.max(tl.where(live_GS, score_GS, LEAST))), 0.0)
            score_GS = power_GS / tl.sum(power_GS)
        else:
            score_GS = tl.sigmoid(score_GS)
    rank_GS = score_GS
    if CORRECTED:
        rank_GS += tl.load(correction + number_GS, mask=live_GS, other=0.0)
    rank_GS = tl.where(rank_GS == rank_GS, tl.maximum(rank_GS, LEAST), LEAST)  # not a number: the last choice
    rank_GS = tl.where(live_GS, rank_GS, float("-inf"))
    if BEST_GROUPS < GROUPS:
        best_G = tl.max(rank_GS, 1)
        if CORRECTED:  # the sum of a group's two best
            first_G = tl.argmax(rank_GS, 1)
            best_G += tl.max(tl.where(s_S[None, :] == first_G[:, None], float("-inf"), rank_GS), 1)
        best_G = tl.where(g_G < GROUPS, tl.maximum(best_G, LEAST), float("-inf"))
        kept_G = tl.zeros([BLOCK_G], tl.int32)
        for _ in range(BEST_GROUPS):
            group = tl.argmax(best_G, 0)
            kept_G = tl.where(g_G == group, 1, kept_G)
            best_G = tl.where(g_G == group, float("-inf"), best_G)
        rank_GS = tl.where((kept_G > 0)[:, None], rank_GS, tl.minimum(rank_GS, LEAST))
    k_K = tl.arange(0, BLOCK_K)
    weight_K = tl.zeros([BLOCK_K], tl.float32)
    expert_K = tl.zeros([BLOCK_K], tl.int32)
    for k in range(NUM_CHOSEN):
        best = tl.max(rank_GS)
        expert = tl.min(tl.where(rank_GS == best, number_GS, GROUPS * IN_GROUP))
        chosen_GS = live_GS & (number_GS == expert)
        expert_K = tl.where(k_K == k, expert, expert_K)
        weight_K = tl.where(k_K == k, tl.sum(tl.where(chosen_GS, score_GS, 0.0)), weight_K)
        rank_GS = tl.where(chosen_GS, float("-inf"), rank_GS)
    live_K = k_K < NUM_CHOSEN
    if BY_SCORES:
        if SOFTMAX:
            power_K = tl.where(live_K, tl.exp(weight_K - tl.max(tl.where(live_K, weight_K, LEAST))), 0.0)
            weight_K = power_K / tl.sum(power_K)
        else:
            weight_K = tl.sigmoid(weight_K)
    elif NORMALISED:
        weight_K = weight_K / (tl.sum(tl.where(live_K, weight_K, 0.0)) + 1e-20)
    at_K = token * NUM_CHOSEN + k_K
    tl.store(weights + at_K, (weight_K * scale).to(weights.dtype.element_ty), mask=live_K)
    tl.store(experts + at_K, expert_K.to(tl.int64), mask=live_K)
