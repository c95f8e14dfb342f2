"""Log probabilities of prompts' tokens.

Legend: T new tokens in the step · E prompt positions whose logits are wanted · D model dim · V vocabulary
Owns: which positions are scored, for which tokens.  Does not know: sampling, the model.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.execution.prompts import Columns, Int64, PromptSegment, Wanted
from engine.messages import Admission
from engine.models.model import Model
from engine.sampling.logprobs import BatchLogprobs, joined_logprobs
from engine.sampling.sampler import Sampler
from engine.types.logprobs import PromptLogprobs

SCORED_ROWS = 128  # rows of logits at a time: those of a whole step may take gigabytes


@dataclass(frozen=True, slots=True)
class _Scored:
    """A row's share of the E positions: entries first..first + count - 1 of its prompt."""

    row: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The scores of a step, as ``PromptResult``."""

    logprobs: BatchLogprobs
    scored: tuple[_Scored, ...]

    def to_host(self) -> "ScoredPrompts":
        return replace(self, logprobs=self.logprobs.to_host())

    def columns(self) -> Columns:
        """Return the log probabilities of each row's part of the prompt."""
        entries = self.logprobs.messages()
        start, by_row = 0, {}
        for one in self.scored:
            by_row[one.row] = PromptLogprobs(
                first=one.first, entries=tuple(entries[index] for index in range(start, start + one.count))
            )
            start += one.count
        return {"prompt_logprobs": by_row}


class PromptScores:
    """The rows whose prompts are scored; a ``PromptReader``."""

    def __init__(self, sampler: Sampler) -> None:
        """Make it.  sampler: it has the rows' temperatures and cuts."""
        self._sampler = sampler
        self._rows: dict[int, Admission] = {}

    def admit(self, admission: Admission) -> bool:
        self._rows.pop(admission.row, None)
        if admission.params.prompt_logprobs is None:
            return False
        self._rows[admission.row] = admission
        return True

    def wanted(self, segments: list[PromptSegment]) -> Wanted | None:
        scored: list[_Scored] = []
        at: list[Int64] = []
        next_ids: list[Int64] = []
        num_top: list[Int64] = []
        rows: list[Int64] = []
        for one in segments:
            if (admission := self._rows.get(one.row)) is None:
                continue
            if (count := min(one.length, admission.num_prompt_tokens - 1 - one.start)) > 0:
                first = one.start + 1
                tokens = np.frombuffer(admission.token_ids, dtype=np.int32)
                scored.append(_Scored(one.row, first, count))
                at.append(np.arange(one.at, one.at + count))
                next_ids.append(tokens[first : first + count].astype(np.int64))
                num_top.append(np.full(count, admission.params.prompt_logprobs))
                rows.append(np.full(count, one.row))
        if not scored:
            return None
        asked = _WantedScores(np.concatenate(rows), np.concatenate(next_ids), np.concatenate(num_top))
        read = partial(_scores, self._sampler, asked, tuple(scored))
        return Wanted(np.concatenate(at), read)

    def sums(self, row: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _WantedScores:
    """The row of each position, the token after it, whose log probability is wanted, and the number of alternatives."""

    rows_E: Int64
    next_ids_E: Int64
    num_top_E: Int64


def _scores(
    sampler: Sampler, asked: _WantedScores, scored: tuple[_Scored, ...], states_ED: Tensor, model: Model
) -> ScoredPrompts:
    """Return the scores."""
    on_device_E = torch.from_numpy(asked.next_ids_E).to(states_ED.device, non_blocking=True)
    parts = []
    for first in range(0, len(states_ED), SCORED_ROWS):
        part = slice(first, first + SCORED_ROWS)
        logits_eV, num_top = sampler.scaled(model.logits(states_ED[part]), asked.rows_E[part]), asked.num_top_E[part]
        parts.append(sampler.logprobs(logits_eV, on_device_E[part], np.arange(len(num_top)), num_top))
    return ScoredPrompts(joined_logprobs(parts), scored)
