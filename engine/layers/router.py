"""The router that sends each token to its experts (Shazeer et al. 2017; groups, corrections: DeepSeek-AI 2024).

Legend: T new tokens in the step · D model dim · E experts · K experts of a token · G groups of experts
Owns: scores, the choice, the weights.  Does not know: experts, ranks: every rank computes the same choice.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import RouterShape
from engine.layers.kernels import DeviceKernels
from engine.layers.linear import Linear
from engine.layers.mlp import activated, activated_by_rows
from engine.layers.weights import WeightSlice, parameter, whole


def row_sums(weights_TK: Tensor) -> Tensor:
    """Return the sum of each row, [T, 1]."""
    return weights_TK.sum(-1, keepdim=True)


def sums_by_rows(weights_TK: Tensor) -> Tensor:
    """Return the sum of each row, [T, 1], in the order of its numbers, as torch adds only some numbers of rows."""
    first_T1, *others = weights_TK.split(1, 1)
    total_T1 = first_T1.clone()
    for one in others:
        total_T1 += one
    return total_T1


class Router:
    """Chooses each token's experts and their weights.  It is never rounded: tokens would go to other experts."""

    def __init__(
        self,
        shape: RouterShape,
        hidden_size: int,
        num_experts: int,
        num_chosen: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self.num_chosen = num_chosen
        self.linear = Linear(hidden_size, num_experts, shape.bias, device, torch.float32 if shape.exact else dtype)
        self._activate, self._total = activated, row_sums
        self.correction_E: Tensor | None = None
        if shape.corrected:
            self.correction_E = parameter(num_experts, device=device, dtype=torch.float32)

    def by_rows(self) -> None:
        """Compute the choice by rows (``RowwisePart``), but for the product."""
        self._activate, self._total = activated_by_rows, sums_by_rows

    def __call__(self, x_TD: Tensor, kernels: DeviceKernels | None = None) -> tuple[Tensor, Tensor]:
        """Return weights_TK in x's dtype, and experts_TK."""
        shape = self.shape
        scores_TE = self.linear(x_TD.float() if shape.exact else x_TD)
        if kernels is not None:
            return kernels.choose_experts(scores_TE, self.correction_E, self.num_chosen, shape, x_TD.dtype)
        scores_TE = scores_TE.float()
        if shape.by_scores:
            # The same order as that of what follows from the scores, without computing it for all experts.
            scores_TK, experts_TK = self._grouped(scores_TE, -torch.inf).topk(self.num_chosen, -1)
            weights_TK = scores_TK.softmax(-1) if shape.normalised else self._activate(scores_TK, "sigmoid")
        else:
            is_sigmoid = shape.scoring == "sigmoid"
            scores_TE = self._activate(scores_TE, "sigmoid") if is_sigmoid else scores_TE.softmax(-1)
            # Scores are at least 0, but a corrected score may be negative.
            hidden = 0.0 if self.correction_E is None else -torch.inf
            chosen_by_TE = scores_TE if self.correction_E is None else scores_TE + self.correction_E
            experts_TK = self._grouped(chosen_by_TE, hidden).topk(self.num_chosen, -1).indices
            weights_TK = scores_TE.gather(1, experts_TK)
            if shape.normalised:
                weights_TK = weights_TK / (self._total(weights_TK) + 1e-20)
        return weights_TK.mul_(shape.scale).to(x_TD.dtype), experts_TK

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that the router reads."""
        name = f"{prefix}.{self.shape.name}"
        yield whole(f"{name}.weight", self.linear.weight)
        if self.linear.bias is not None:
            yield whole(f"{name}.bias", self.linear.bias)
        if self.correction_E is not None:
            correction = self.shape.correction
            yield whole(
                f"{prefix}.{correction}" if correction else f"{name}.e_score_correction_bias", self.correction_E
            )

    def _grouped(self, scores_TE: Tensor, hidden: float) -> Tensor:
        """Return the scores, with ``hidden`` for experts outside the best groups."""
        shape = self.shape
        if shape.num_chosen_groups == shape.num_groups:
            return scores_TE
        scores_TGE = scores_TE.unflatten(-1, (shape.num_groups, -1))
        best_TG = scores_TGE.topk(2, -1).values.sum(-1) if shape.corrected else scores_TGE.amax(-1)
        groups = best_TG.topk(shape.num_chosen_groups, -1).indices
        kept_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, groups, True)
        return scores_TGE.masked_fill(~kept_TG[..., None], hidden).flatten(1)
