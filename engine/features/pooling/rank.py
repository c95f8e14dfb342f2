"""Pooling on a rank: the last state of a prompt, the mean over its states, or the logits of labels.

Legend: T new tokens in the step · P pooled positions · R pooled rows whose prompts end · D model dim
        W numbers of a result
Owns: which positions are pooled, and sums over the steps of one prompt.  Does not know: sampling, the model's head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.execution.features import RankContext, RankFeature
from engine.execution.prompts import Columns, PromptSegment, Wanted
from engine.messages import Admission
from engine.models.model import Model

METHODS = ("last", "mean", "classify")


@dataclass(frozen=True, slots=True)
class _Pooled:
    """A row's share of the P positions.  num_tokens: number of tokens of the prompt, if it ends here; else 0."""

    row: int
    count: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The results of a step, as ``PromptResult``.

    pooled_RW: float32 of ``rows``: the mean or last state, or labels' logits; None if no row's prompt ends."""

    rows: tuple[int, ...]
    pooled_RW: Tensor | None

    def to_host(self) -> "PooledPrompts":
        if self.pooled_RW is None:
            return self
        pinned_RW = torch.empty(self.pooled_RW.shape, dtype=self.pooled_RW.dtype, pin_memory=True)
        return replace(self, pooled_RW=pinned_RW.copy_(self.pooled_RW, non_blocking=True))

    def columns(self) -> Columns:
        """Return each row's numbers as bytes."""
        if self.pooled_RW is None:
            return {}
        return {"result": {row: one.tobytes() for row, one in zip(self.rows, self.pooled_RW.numpy(), strict=True)}}


class PooledRows:
    """The rows whose prompts are pooled; a ``PromptReader``."""

    def __init__(self) -> None:
        self._methods: dict[int, str] = {}
        self._sums: dict[int, Tensor] = {}

    def admit(self, admission: Admission) -> bool:
        self._methods.pop(admission.row, None)
        self._sums.pop(admission.row, None)
        if admission.params.pooling not in METHODS:
            return False
        self._methods[admission.row] = admission.params.pooling
        return True

    def wanted(self, segments: list[PromptSegment]) -> Wanted | None:
        pooled, at = [], []
        for one in segments:
            method = self._methods.get(one.row)
            if method == "mean" or (method is not None and one.ends):
                count, end = one.length if method == "mean" else 1, one.at + one.length
                pooled.append(_Pooled(one.row, count, one.start + one.length if one.ends else 0))
                at.append(np.arange(end - count, end))
        return Wanted(np.concatenate(at), partial(self._read, pooled)) if pooled else None

    def sums(self, row: int) -> bool:
        return self._methods.get(row) == "mean"

    def _read(self, pooled: Sequence[_Pooled], states_PD: Tensor, model: Model) -> PooledPrompts:
        """Return the results of prompts that end.  A model has labels for all of its requests or for none."""
        normed_PD, head = model.normed(states_PD), model.task_head
        states_PW = normed_PD.to(torch.float32)
        if any(self._methods[one.row] == "classify" for one in pooled):
            assert head is not None, "a request for labels came to a model that has none"
            states_PW = head.labels(normed_PD)
        ended: dict[int, Tensor] = {}
        for one, part in zip(pooled, states_PW.split([one.count for one in pooled]), strict=True):
            total = part.sum(dim=0)
            if one.row in self._sums:
                total = total + self._sums.pop(one.row)
            if not one.num_tokens:
                self._sums[one.row] = total
            else:
                is_mean = self._methods[one.row] == "mean"
                ended[one.row] = total / one.num_tokens if is_mean else total
        return PooledPrompts(tuple(ended), torch.stack(list(ended.values())) if ended else None)


class PoolingRank(RankFeature):
    """Pooling on one rank."""

    def __init__(self) -> None:
        self.reader = PooledRows()


def rank_feature(context: RankContext) -> PoolingRank:
    """Return the feature."""
    return PoolingRank()
