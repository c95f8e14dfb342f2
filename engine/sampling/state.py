"""Sampling parameters of every row's current sequence, and batches of rows with their parameters on the device.

Legend: N sampled rows of the batch · n rows of a part · r, p rows of a part that a parameter applies to
Owns: one entry of host arrays per row, overwritten as a whole when a sequence gets the row; token counts; how a batch
is split, and the copies to the device.  Does not know: logits, why rows change hands.

Arrays hold derived numbers, ready for torch, kernels and captured steps, and are computed here alone.  A parameter that
excludes tokens by their distance to the most likely one is one more bound in ``floor``.

A part of a batch is either greedy or random, and either adjusted (bias, penalty or suppressed stop tokens) or not, so
the parameters of one row cost the other rows nothing.  Parts are built when the batch changes, not every step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.cuts import Cuts, TopK, TopP
from engine.sampling.draw import stream_starts
from engine.sampling.logprobs import Named, named_tokens
from engine.sampling.penalties import NO_PENALTIES, Penalties, TokenCounts
from engine.types.params import SamplingParams

NO_LOGPROBS: Final = -1
_NO_CUTS: Final = (0, 1.0, np.inf)
_NO_PENALTIES: Final = tuple(NO_PENALTIES.values())

# Most scores in a part.  On a CPU its passes then stay inside the cache: 64 rows of 152 k tokens take under a third of
# the time of a single part.  On a GPU it bounds memory: 64 MB for each float32 copy of the scores.
PART_SCORES_CPU: Final = 1 << 19
PART_SCORES_GPU: Final = 1 << 24

Int64 = npt.NDArray[np.int64]
Split = Callable[[Int64, npt.NDArray[np.bool_]], tuple[Any, ...]]
_NO_BIAS: Final = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence that gets a row.  token_ids: its prompt, then output kept over a retraction."""

    row: int
    params: SamplingParams
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int


class SamplingState:
    """Parameters by row, and ``version``, which changes with any row."""

    def __init__(self, max_rows: int, vocab_size: int, max_len: int, device: torch.device) -> None:
        self.version = 0
        self.vocab_size = vocab_size
        self.device = device
        self.counts = TokenCounts(max_rows, vocab_size, max_len, device)
        self.greedy = np.ones(max_rows, dtype=np.bool_)
        self.penalised = np.zeros(max_rows, dtype=np.bool_)
        self.inverse_temperature = np.zeros(max_rows, dtype=np.float32)  # 0 is greedy
        self.cut = np.zeros(max_rows, dtype=np.bool_)  # whether one of the next three is on; False for greedy rows
        self.top_k = np.zeros(max_rows, dtype=np.int32)  # 0 is off
        self.top_p = np.ones(max_rows, dtype=np.float64)  # 1 is off
        self.floor = np.full(max_rows, np.inf, dtype=np.float32)  # magnitude of the lowest score that may be drawn
        self.penalties = np.tile(np.array(_NO_PENALTIES, dtype=np.float32), (max_rows, 1))  # in NO_PENALTIES' order
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self.scaled = np.zeros(max_rows, dtype=np.bool_)  # whether log probabilities are those that tokens are drawn by
        # Tokens whose log probabilities are returned in place of the most likely ones'.
        self.named: list[Int64] = [_NO_BIAS[0]] * max_rows
        self.processed = np.zeros(max_rows, dtype=np.bool_)  # whether a logits processor changes its logits
        self.biased = np.zeros(max_rows, dtype=np.bool_)
        self.bias: list[tuple[Int64, npt.NDArray[np.float32]]] = [_NO_BIAS] * max_rows
        # A token at a position below ``stop_from`` must not be one of ``stop_ids``.
        self.stop_from = np.zeros(max_rows, dtype=np.int64)
        self.stop_ids: list[Int64] = [_NO_BIAS[0]] * max_rows

    def admit(self, newcomers: Sequence[Newcomer], eos_token_ids: Sequence[int]) -> None:
        """Assign different rows to sequences."""
        self.version += 1
        for one in newcomers:
            row, params = one.row, one.params
            self._admit_draw(row, params)
            self.seed[row] = params.seed or 0
            self.processed[row] = bool(params.logits_processors)
            self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
            self.scaled[row] = params.processed_logprobs
            self.named[row] = np.array(list(dict.fromkeys(params.logprob_token_ids)), dtype=np.int64)
            self._admit_bias(row, params)
            self._admit_stops(row, params, one.num_prompt_tokens, eos_token_ids)
            self._admit_penalties(row, params)
        if counted := [one for one in newcomers if self.penalised[one.row]]:
            self.counts.hold(counted)

    def _admit_draw(self, row: int, params: SamplingParams) -> None:
        self.greedy[row] = greedy = params.greedy
        self.inverse_temperature[row] = 0.0 if greedy else np.float32(1.0) / np.float32(params.temperature)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        floor = abs(np.log(params.min_p)) if params.min_p > 0.0 else np.inf
        cuts = _NO_CUTS if greedy else (top_k, params.top_p, floor)
        self.top_k[row], self.top_p[row], self.floor[row] = cuts
        self.cut[row] = cuts != _NO_CUTS

    def _admit_bias(self, row: int, params: SamplingParams) -> None:
        self.biased[row] = bool(params.logit_bias)
        self.bias[row] = _NO_BIAS
        if params.logit_bias:
            self.bias[row] = (
                np.fromiter(params.logit_bias.keys(), dtype=np.int64),
                np.fromiter(params.logit_bias.values(), dtype=np.float32),
            )

    def _admit_stops(
        self, row: int, params: SamplingParams, num_prompt_tokens: int, eos_token_ids: Sequence[int]
    ) -> None:
        # With ignore_eos an EOS token does not end the sequence, so it is not suppressed.
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.stop_ids[row] = np.array(sorted(ids), dtype=np.int64)
        self.stop_from[row] = num_prompt_tokens + params.min_tokens if ids else 0

    def _admit_penalties(self, row: int, params: SamplingParams) -> None:
        if self.penalised[row]:
            self.counts.release(row)
        given = tuple(getattr(params, f"{name}_penalty") for name in NO_PENALTIES)
        self.penalties[row] = given
        self.penalised[row] = given != _NO_PENALTIES

    def adjusted(self, rows_N: Int64, holding_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return whether a row has bias, penalties or suppressed stop tokens.  holding_N: those with the last."""
        adjusted_N: npt.NDArray[np.bool_] = self.biased[rows_N] | self.penalised[rows_N] | holding_N
        return adjusted_N


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the logits of a part.  bias_at, hold_at: int64 into the flattened [n, V] logits."""

    bias_at: Tensor | None
    bias: Tensor | None
    penalties: Penalties | None
    hold_at: Tensor | None


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters of the draws of a random part.  inverse_temperature_n: float32.  stream_starts_n: int64."""

    inverse_temperature_n: Tensor
    stream_starts_n: Tensor
    cuts: Cuts | None


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a batch that are sampled alike.  at: their indices; a slice for neighbours, to avoid a copy of logits."""

    at: slice | Tensor
    adjustments: Adjustments | None
    draws: Draws | None


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A batch of rows with their parameters.

    parts: ``SampledRows``, or those of ``engine/sampling/triton/sampler.py``.
    counted_at, counted_lines: int64, rows whose sampled token must be counted, and their lines of counts.
    logprobs_at: int64, rows with log probabilities.  num_logprobs: number of alternatives for each.
    named: the tokens that rows name in place of the most likely ones.
    scaled: the rows whose log probabilities are those that their tokens are drawn by."""

    parts: tuple[Any, ...]
    draws_any: bool
    counted_at: Tensor | None
    counted_lines: Tensor | None
    logprobs_at: Int64
    num_logprobs: Int64
    named: Named | None
    scaled: tuple[SampledRows, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether every row needs its likeliest token and nothing else."""
        one = self.parts[0]
        return one.draws is None and one.adjustments is None and len(self.parts) == 1 and not len(self.logprobs_at)


def build_batch(
    state: SamplingState, rows_N: Int64, holding_N: npt.NDArray[np.bool_], split: Split | None = None
) -> SampleBatch:
    """Build the batch of these rows.

    holding_N: rows that have not yet produced their min_tokens.  split: makes the parts instead."""
    counted_at = np.flatnonzero(state.penalised[rows_N])
    logprobs_at = np.flatnonzero(state.logprobs[rows_N] != NO_LOGPROBS)
    return SampleBatch(
        parts=_split(state, rows_N, holding_N) if split is None else split(rows_N, holding_N),
        draws_any=not state.greedy[rows_N].all(),
        counted_at=_upload(state, counted_at) if len(counted_at) else None,
        counted_lines=_upload(state, state.counts.lines(rows_N[counted_at])) if len(counted_at) else None,
        logprobs_at=logprobs_at,
        num_logprobs=state.logprobs[rows_N[logprobs_at]],
        named=named_tokens([state.named[row] for row in rows_N[logprobs_at]], state.device)
        if len(logprobs_at)
        else None,
        scaled=scaled_rows(state, rows_N, holding_N) if len(logprobs_at) else (),
    )


def scaled_rows(state: SamplingState, rows_N: Int64, holding_N: npt.NDArray[np.bool_]) -> tuple[SampledRows, ...]:
    """Return the rows whose log probabilities are those that their tokens are drawn by, in parts."""
    scaled_N = state.scaled[rows_N]
    return _split(state, rows_N, holding_N, scaled_N) if scaled_N.any() else ()


def _split(
    state: SamplingState, rows_N: Int64, holding_N: npt.NDArray[np.bool_], among_N: npt.NDArray[np.bool_] | None = None
) -> tuple[SampledRows, ...]:
    """Return the rows in parts.  among_N: the rows that are wanted; None for all."""
    adjusted_N = state.adjusted(rows_N, holding_N)
    random_N = ~state.greedy[rows_N]
    rows_per_part = max(1, (PART_SCORES_CPU if state.device.type == "cpu" else PART_SCORES_GPU) // state.vocab_size)
    parts: list[SampledRows] = []
    for adjusted, random in ((False, False), (False, True), (True, False), (True, True)):
        wanted_N = (adjusted_N == adjusted) & (random_N == random)
        at = np.flatnonzero(wanted_N if among_N is None else wanted_N & among_N)
        size = rows_per_part if adjusted or random else max(1, len(at))
        for start in range(0, len(at), size):
            part_at = at[start : start + size]
            rows_n = rows_N[part_at]
            parts.append(
                SampledRows(
                    at=_slice_or_index(state, part_at),
                    adjustments=_adjustments(state, rows_n, holding_N[part_at]) if adjusted else None,
                    draws=_draws(state, rows_n) if random else None,
                )
            )
    return tuple(parts)


def _adjustments(state: SamplingState, rows_n: Int64, holding_n: npt.NDArray[np.bool_]) -> Adjustments:
    bias_at, bias, hold_at = [], [], []
    for index, row in enumerate(rows_n.tolist()):
        ids, values = state.bias[row]
        bias_at.append(index * state.vocab_size + ids)
        bias.append(values)
        if holding_n[index]:
            hold_at.append(index * state.vocab_size + state.stop_ids[row])
    has_bias = bool(state.biased[rows_n].any())
    return Adjustments(
        bias_at=_upload(state, np.concatenate(bias_at)) if has_bias else None,
        bias=_upload(state, np.concatenate(bias)) if has_bias else None,
        penalties=_penalties(state, rows_n),
        hold_at=_upload(state, np.concatenate(hold_at)) if hold_at else None,
    )


def _penalties(state: SamplingState, rows_n: Int64) -> Penalties | None:
    at = np.flatnonzero(state.penalised[rows_n])
    if not len(at):
        return None
    rows_p = rows_n[at]

    penalties_pP = state.penalties[rows_p]
    some = (penalties_pP != _NO_PENALTIES).any(axis=0)
    return Penalties(
        at_p=_upload(state, at),
        lines_p=_upload(state, state.counts.lines(rows_p)),
        columns={
            name: _upload(state, penalties_pP[:, index, None]) for index, name in enumerate(NO_PENALTIES) if some[index]
        },
    )


def _draws(state: SamplingState, rows_n: Int64) -> Draws:
    return Draws(
        inverse_temperature_n=_upload(state, state.inverse_temperature[rows_n]),
        stream_starts_n=stream_starts(_upload(state, state.seed[rows_n])),
        cuts=_cuts(state, rows_n),
    )


def _cuts(state: SamplingState, rows_n: Int64) -> Cuts | None:
    if not state.cut[rows_n].any():
        return None
    top_k_n, top_p_n = state.top_k[rows_n].astype(np.int64), state.top_p[rows_n]
    with_k = np.flatnonzero(top_k_n)
    only_p = np.flatnonzero((top_k_n == 0) & (top_p_n < 1.0))
    top_k = top_p = None
    if len(with_k):
        top_p_r1 = top_p_n[with_k, None]
        top_k = TopK(
            at_r=_upload(state, with_k),
            last_r1=_upload(state, top_k_n[with_k, None] - 1),
            width=int(top_k_n.max()),
            top_p_r1=_upload(state, top_p_r1) if (top_p_r1 < 1.0).any() else None,
        )
    if len(only_p):
        top_p = TopP(at_r=_upload(state, only_p), top_p_r1=_upload(state, top_p_n[only_p, None]))
    return Cuts(floor_n1=_upload(state, -state.floor[rows_n, None]), top_k=top_k, top_p=top_p)


def _slice_or_index(state: SamplingState, at: Int64) -> slice | Tensor:
    first, last = int(at[0]), int(at[-1])
    return slice(first, last + 1) if last - first + 1 == len(at) else _upload(state, at)


def _upload(state: SamplingState, values: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(state.device, non_blocking=True)
