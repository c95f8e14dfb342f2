"""The states of every token of some prompts, on a rank.

Legend: P positions of a step's prompts · D model dim
Owns: which positions are read, the states of earlier chunks.  Does not know: the model's head, sampling.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.execution.features import RankContext, RankFeature
from engine.execution.prompts import Columns, PromptSegment, Wanted
from engine.features.token_embed.checkpoint import NAME
from engine.messages import Admission
from engine.models.model import Model

MOST_BYTES: Final = 32 << 20  # in the result of a step, which must fit a frame between two processes


@dataclass(slots=True)
class _TokenRow:
    """A row's states of the steps that have completed.  row: its number."""

    row: int
    parts: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenStates:
    """The results of a step, as ``PromptResult``.

    rows: with the number of positions that belong to each, and whether its prompt ends.  states_PD: float32."""

    rows: tuple[tuple[_TokenRow, int, bool], ...]
    states_PD: Tensor

    def to_host(self) -> "TokenStates":
        pinned_PD = torch.empty(self.states_PD.shape, dtype=self.states_PD.dtype, pin_memory=True)
        return replace(self, states_PD=pinned_PD.copy_(self.states_PD, non_blocking=True))

    def columns(self) -> Columns:
        """Return all states of each prompt that ends; none for a prompt without room in the result."""
        ended: dict[int, bytes] = {}
        first = room = 0
        for row, count, ends in self.rows:
            row.parts.append(self.states_PD[first : first + count].numpy().tobytes())
            first += count
            if ends and (room := room + sum(map(len, row.parts))) <= MOST_BYTES:
                ended[row.row] = b"".join(row.parts)
        return {"result": ended}


class TokenReader:
    """The rows whose tokens are embedded; a ``PromptReader``."""

    def __init__(self) -> None:
        self._rows: dict[int, _TokenRow] = {}

    def admit(self, admission: Admission) -> bool:
        self._rows.pop(admission.row, None)
        if admission.params.pooling != NAME:
            return False
        self._rows[admission.row] = _TokenRow(admission.row)
        return True

    def wanted(self, segments: list[PromptSegment]) -> Wanted | None:
        own = [one for one in segments if one.row in self._rows]
        if not own:
            return None
        rows = tuple((self._rows[one.row], one.length, one.ends) for one in own)
        return Wanted(np.concatenate([np.arange(one.at, one.at + one.length) for one in own]), partial(_read, rows))

    def sums(self, row: int) -> bool:
        return False  # parts are kept only when a step's result is collected


def _read(rows: tuple[tuple[_TokenRow, int, bool], ...], states_PD: Tensor, model: Model) -> TokenStates:
    return TokenStates(rows, model.normed(states_PD).to(torch.float32))


class TokenEmbedRank(RankFeature):
    """The way ``token_embed`` on one rank."""

    def __init__(self) -> None:
        self.reader = TokenReader()


def rank_feature(context: RankContext) -> TokenEmbedRank | None:
    """Return the feature; None for a model that does not have the way."""
    return TokenEmbedRank() if NAME in context.spec.use.ways else None
