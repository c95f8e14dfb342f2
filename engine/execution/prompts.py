"""Results that some requests want of their prompts, in addition to tokens: log probabilities, or a pooled vector.

Legend: T new tokens in the step · N sampled rows · E prompt positions whose logits are wanted · P pooled positions
        S prefill segments · R pooled rows whose prompts end · D model dim · W numbers of a result · V vocabulary
Owns: the positions of a step that are wanted, and sums over the steps of one prompt.
Does not know: sampling, the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.layers.pooled_head import PooledHead
from engine.messages import Admission, PromptLogprobs, Step
from engine.models.model import Model
from engine.sampling.logprobs import BatchLogprobs, batch_logprobs, joined_logprobs

Int64 = npt.NDArray[np.int64]

SCORED_ROWS = 128  # rows of logits at a time: those of a whole step may take gigabytes


@dataclass(frozen=True, slots=True)
class _Scored:
    """A row's share of the E positions: entries first..first + count - 1 of its prompt."""

    row: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Pooled:
    """A row's share of the P positions.  num_tokens: number of tokens of the prompt, if it ends here; else 0."""

    row: int
    count: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """The prompt outputs that a step must compute.

    scored_at_E, pooled_at_P: indexes in T.
    next_ids_E: the token after each scored position, whose log probability is wanted.
    num_top_E: number of alternatives with it."""

    scored_at_E: Int64
    next_ids_E: Int64
    num_top_E: Int64
    scored: tuple[_Scored, ...]
    pooled_at_P: Int64
    pooled: tuple[_Pooled, ...]


@dataclass(frozen=True, slots=True)
class PromptResults:
    """The prompt outputs of a step, on the device, or on the host when an event is reached.

    pooled_RW: float32 of ``pooled_rows``: the mean or last state, or labels' logits; None if no row's prompt ends."""

    logprobs: BatchLogprobs | None
    scored: tuple[_Scored, ...]
    pooled_rows: tuple[int, ...] = ()
    pooled_RW: Tensor | None = None

    def to_host(self) -> "PromptResults":
        """Queue the copies; read them only after an event recorded after this call."""
        pooled_RW = self.pooled_RW
        if pooled_RW is not None:
            pinned_RW = torch.empty(pooled_RW.shape, dtype=pooled_RW.dtype, pin_memory=True)
            pooled_RW = pinned_RW.copy_(pooled_RW, non_blocking=True)
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, logprobs=logprobs, pooled_RW=pooled_RW)

    def prompt_logprobs(self) -> dict[int, PromptLogprobs]:
        """Return row -> log probabilities of its part of the prompt."""
        if self.logprobs is None:
            return {}
        entries = self.logprobs.messages()
        start, by_row = 0, {}
        for one in self.scored:
            by_row[one.row] = PromptLogprobs(
                first=one.first, entries=tuple(entries[index] for index in range(start, start + one.count))
            )
            start += one.count
        return by_row

    def pooled_bytes(self) -> dict[int, bytes]:
        """Return row -> float32[W] as bytes."""
        if self.pooled_RW is None:
            return {}
        return {row: one.tobytes() for row, one in zip(self.pooled_rows, self.pooled_RW.numpy(), strict=True)}


class Prompts:
    """The rows that want prompt outputs, from their admission to their first token.

    rows: admissions of these rows, and of rows that wanted some when they were last admitted.  While it is empty, no
    other method needs to be called."""

    def __init__(self) -> None:
        self.rows: dict[int, Admission] = {}
        self._sums: dict[int, Tensor] = {}

    def admit(self, admission: Admission) -> None:
        """Note the wishes of a sequence that takes a row."""
        self.rows.pop(admission.row, None)
        self._sums.pop(admission.row, None)
        params = admission.params
        if params.prompt_logprobs is not None or params.pooling:
            self.rows[admission.row] = admission

    def wanted(self, step: Step, batch: Batch) -> PromptOutputs | None:
        """Return the outputs that a step must compute; None if there are none, which costs next to nothing."""
        if not self.rows or not step.prefill_rows:
            return None
        rows = np.frombuffer(step.prefill_rows, dtype=np.int32).tolist()
        starts = np.frombuffer(step.prefill_starts, dtype=np.int32).tolist()
        lengths = np.frombuffer(step.prefill_lengths, dtype=np.int32).tolist()
        samples = np.frombuffer(step.prefill_samples, dtype=np.int32).tolist()
        scored: list[_Scored] = []
        pooled: list[_Pooled] = []
        scored_at: list[Int64] = []
        next_ids: list[Int64] = []
        num_top: list[Int64] = []
        pooled_at: list[Int64] = []
        for segment, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            admission = self.rows.get(row)
            at = int(batch.query_starts_B1[batch.num_decodes + segment])
            ends = samples[segment] == 1
            if admission is not None:
                params, num_prompt = admission.params, admission.num_prompt_tokens
                if params.prompt_logprobs is not None and (count := min(length, num_prompt - 1 - start)) > 0:
                    tokens = np.frombuffer(admission.token_ids, dtype=np.int32)
                    scored.append(_Scored(row, start + 1, count))
                    scored_at.append(np.arange(at, at + count))
                    next_ids.append(tokens[start + 1 : start + 1 + count].astype(np.int64))
                    num_top.append(np.full(count, params.prompt_logprobs))
                if params.pooling and (params.pooling == "mean" or ends):
                    count = length if params.pooling == "mean" else 1
                    pooled.append(_Pooled(row, count, start + length if ends else 0))
                    pooled_at.append(np.arange(at + length - count, at + length))
        if not scored and not pooled:
            return None
        return PromptOutputs(
            _joined(scored_at), _joined(next_ids), _joined(num_top), tuple(scored), _joined(pooled_at), tuple(pooled)
        )

    def sums_in(self, step: Step) -> bool:
        """Return whether the step adds to a sum, so that it must not run twice."""
        rows = np.frombuffer(step.prefill_rows, dtype=np.int32).tolist() if self.rows else ()
        return any(row in self.rows and self.rows[row].params.pooling == "mean" for row in rows)

    def results(self, wanted: PromptOutputs, scored_ED: Tensor, states_PD: Tensor, model: Model) -> PromptResults:
        """Return the outputs.  scored_ED, states_PD: the model's states at the scored and the pooled positions."""
        logprobs = None
        if wanted.scored:
            next_ids_E = torch.from_numpy(wanted.next_ids_E).to(scored_ED.device, non_blocking=True)
            parts = []
            for first in range(0, len(scored_ED), SCORED_ROWS):
                part = slice(first, first + SCORED_ROWS)
                logits_eV, num_top = model.logits(scored_ED[part]), wanted.num_top_E[part]
                parts.append(batch_logprobs(logits_eV, next_ids_E[part], np.arange(len(num_top)), num_top))
            logprobs = joined_logprobs(parts)
        ended = self._pool(wanted.pooled, model.normed(states_PD), model.pooled_head)
        if not ended:
            return PromptResults(logprobs, wanted.scored)
        return PromptResults(logprobs, wanted.scored, tuple(ended), torch.stack(list(ended.values())))

    def _pool(self, pooled: Sequence[_Pooled], normed_PD: Tensor, head: PooledHead | None) -> dict[int, Tensor]:
        """Return row -> float32[W], of prompts that end.  A model has labels for all of its requests or for none."""
        states_PW = normed_PD.to(torch.float32)
        if any(self.rows[one.row].params.pooling == "classify" for one in pooled):
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
                is_mean = self.rows[one.row].params.pooling == "mean"
                ended[one.row] = total / one.num_tokens if is_mean else total
        return ended


def _joined(parts: list[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
