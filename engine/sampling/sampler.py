"""The sampler: one next token for every sampled row of a step, each by its own request's parameters.

Legend: N sampled rows of the batch · n rows of a part · V vocabulary · W padded vocabulary
Owns: the order of operations.  Does not know: requests, the model, when a sequence ends.

For each row, in this order:
  1. log probabilities are taken from the unchanged logits; the row's logits processors change a copy, and tokens that
     its grammar forbids are excluded;
  2. logit_bias is added (OpenAI);
  3. repetition, then presence and frequency penalty (``penalties.py``);
  4. EOS and stop tokens are suppressed until min_tokens exist;
  5. temperature: logits are divided by it; 0 takes the most likely token, the lowest id among equals;
  6. min_p: tokens less likely than min_p times the most likely one are cut (Nguyen et al. 2024);
  7. top_k: all but the k most likely are cut (Fan et al. 2018);
  8. top_p: of the rest, renormalised, the smallest set that holds top_p is kept (Holtzman et al. 2020);
  9. one token is drawn by inverse CDF with the uniform number of (seed, position) (``draw.py``).
A row's token does not depend on the rest of the batch.  Nothing here waits for the device.
On a GPU kernels do steps 2 to 9 (``engine/sampling/triton/sampler.py``), in two launches for a batch of plain rows.

Measured on one CPU core, milliseconds per row of 151,936 float32 logits in a batch of 8: greedy 0.08, temperature
0.18, with min_p 0.33, with top_k 0.45, with top_k and top_p 0.55, with top_p alone 1.4; penalties add 0.25.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.messages import RULED_OUT
from engine.sampling.captured import CapturedSampler, SamplingColumns
from engine.sampling.constraints import Masks
from engine.sampling.cuts import lowest_kept
from engine.sampling.draw import BLOCK, draw, padded_scores, padded_width, uniforms, weights
from engine.sampling.logprobs import BatchLogprobs, Named, batch_logprobs, pinned_copy
from engine.sampling.state import (
    Adjustments,
    Draws,
    Newcomer,
    SampleBatch,
    SampledRows,
    SamplingState,
    build_batch,
    scaled_rows,
)

if TYPE_CHECKING:
    from engine.kernels.cpu import CPUKernels
    from engine.sampling.processing import Processing
    from engine.sampling.triton.sampler import KernelSampler

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step.  token_ids_N: int64, a code of ``StepDone`` if there is none.  logprobs: None for none."""

    token_ids_N: Tensor
    logprobs: BatchLogprobs | None

    def to_host(self) -> "SampledTokens":
        """Queue the copy to pinned memory; it can be read after an event recorded after this call."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return SampledTokens(pinned_copy(self.token_ids_N), logprobs)


class Sampler:
    """Samples for the rows of one rank; equal calls on every rank give equal tokens.

    kernels: sample on a GPU, also inside of a captured step; None if torch samples.
    on_cpu: do some of the work on a CPU whose model is float32; logits are then float32.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        max_len: int,
        device: torch.device,
        on_cpu: "CPUKernels | None" = None,
    ) -> None:
        self._on_cpu = on_cpu
        self._state = SamplingState(max_rows, vocab_size, max_len, device)
        self.kernels = None if choose_kernels(device) is None else _kernel_sampler(self._state)
        self._batch_key: tuple[int, bytes, bytes] | None = None
        self._batch: SampleBatch | None = None
        self.processing: Processing | None = None  # set if plugins.logits_processors names any

    def admit(self, newcomers: Sequence[Newcomer], eos_token_ids: Sequence[int]) -> None:
        """Assign different rows to several sequences, with one copy to the device."""
        self._state.admit(newcomers, eos_token_ids)
        if self.processing is not None:
            self.processing.admit(newcomers)

    def captured(self, columns: SamplingColumns[Tensor]) -> CapturedSampler:
        """Return a sampler of the same rows in fixed batches (``captured.py``)."""
        return CapturedSampler(self._state, self.kernels, columns)

    def sample(self, logits_NV: Tensor, rows_N: Int64, positions_N: Int64, masks: Masks | None = None) -> SampledTokens:
        """Sample one token per entry.

        logits_NV: floating point, unchanged afterwards.
        rows_N: a row may be at several positions, unless it has penalties or a grammar, which need the tokens before.
        positions_N: the position of each sampled token, i.e. the number of tokens before it.
        masks: of rows that follow a grammar."""
        batch = self._batch_for(rows_N, positions_N)
        positions = _upload(positions_N, logits_NV.device) if batch.draws_any else None
        chosen_NV = logits_NV if self.processing is None else self.processing.apply(logits_NV, rows_N, positions_N)
        if masks is None:
            token_ids_N = self._pick_all(batch, chosen_NV, positions)
        else:
            raw_RV = masks.apply(chosen_NV)
            token_ids_N = self._pick_all(batch, chosen_NV, positions)
        scaled = [(part.at, self._scores(part, chosen_NV, token_ids_N)) for part in batch.scaled]
        if chosen_NV is not logits_NV:
            token_ids_N = torch.where(chosen_NV.amax(dim=-1) == -torch.inf, RULED_OUT, token_ids_N)
        elif masks is not None:
            masks.restore(chosen_NV, raw_RV)
        logprobs = None
        if len(batch.logprobs_at):
            scores_NV = _replaced(logits_NV, scaled)
            logprobs = self.logprobs(scores_NV, token_ids_N, batch.logprobs_at, batch.num_logprobs, batch.named)
        # Last, so that a step that runs out of memory has counted nothing and can be retried.
        if batch.counted_at is not None and batch.counted_lines is not None:
            self._state.counts.add(batch.counted_lines, token_ids_N.index_select(0, batch.counted_at))
        return SampledTokens(token_ids_N, logprobs)

    def scaled(self, logits_EV: Tensor, rows_E: Int64) -> Tensor:
        """Return the logits of tokens that are given, not drawn; of rows that ask for it those after temperature and
        cuts, float32."""
        parts = scaled_rows(self._state, rows_E, np.zeros(len(rows_E), dtype=np.bool_))
        return _replaced(logits_EV, [(part.at, self._scores(part, logits_EV)) for part in parts])

    def logprobs(
        self, scores_NV: Tensor, token_ids_N: Tensor, at: Int64, num_top: Int64, named: Named | None = None
    ) -> BatchLogprobs:
        """Return the log probabilities of rows ``at``, with the same bits for drawn and for given tokens."""
        return batch_logprobs(scores_NV, token_ids_N, at, num_top, named, self._on_cpu)

    def takes_likeliest(self, rows_N: Int64, positions_N: Int64) -> bool:
        """Return whether these rows need only their likeliest tokens, the first ones among equals."""
        return self.processing is None and self._batch_for(rows_N, positions_N).is_plain

    def _pick_all(self, batch: SampleBatch, logits_NV: Tensor, positions_N: Tensor | None) -> Tensor:
        """Return a token per row, computed part by part."""
        if self.kernels is not None:
            return self.kernels.pick(batch.parts, logits_NV, positions_N)
        if len(batch.parts) == 1:
            return self._pick(batch.parts[0], logits_NV, positions_N)
        token_ids_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        for part in batch.parts:
            at = part.at
            if isinstance(at, slice):
                token_ids_N[at] = self._pick(part, logits_NV[at], positions_N)
            else:
                token_ids_N.index_copy_(0, at, self._pick(part, logits_NV.index_select(0, at), positions_N))
        return token_ids_N

    def _scores(self, part: SampledRows, logits_NV: Tensor, token_ids_N: Tensor | None = None) -> Tensor:
        """Return scores_nV, float32, whose softmax a part's tokens are drawn by; -inf in what is cut.

        token_ids_N: tokens that were drawn, and so were not cut: a kernel's cut may differ by a rounding."""
        logits_nV = logits_NV[part.at]
        if part.adjustments is not None:
            logits_nV = self._adjusted(part.adjustments, logits_nV)
        if part.draws is None:
            return logits_nV.to(torch.float32, copy=True)
        drawn_n1 = None if token_ids_N is None else token_ids_N[part.at, None].clamp(min=0)
        scores_nW = candidate_scores(part.draws, logits_nV, drawn_n1, self._on_cpu)
        return scores_nW[:, : logits_nV.shape[1]]

    def _batch_for(self, rows_N: Int64, positions_N: Int64) -> SampleBatch:
        """Return the batch, built anew only if it has changed since the last step: a steady decode step builds none."""
        holding_N = positions_N < self._state.stop_from[rows_N]
        key = (self._state.version, rows_N.tobytes(), holding_N.tobytes())
        if self._batch is None or self._batch_key != key:
            split = None if self.kernels is None else self.kernels.plan
            self._batch, self._batch_key = build_batch(self._state, rows_N, holding_N, split), key
        return self._batch

    def _pick(self, part: SampledRows, logits_nV: Tensor, positions_N: Tensor | None) -> Tensor:
        """Return a token per row of a part; -1 if the maximum of the logits, unchanged or adjusted, is not finite."""
        raw_top_n = None
        if part.adjustments is not None:
            raw_top_n = logits_nV.amax(dim=-1)
            logits_nV = self._adjusted(part.adjustments, logits_nV)
        if part.draws is None and raw_top_n is None and self._on_cpu is not None:
            return self._on_cpu.likeliest(logits_nV)
        if part.draws is None:
            top_n, token_ids_n = logits_nV.max(dim=-1)
        else:
            assert positions_N is not None
            positions_n = positions_N[part.at] if isinstance(part.at, slice) else positions_N.index_select(0, part.at)
            starts_n, width = part.draws.stream_starts_n, padded_width(logits_nV.shape[1])
            if self._on_cpu is not None and raw_top_n is None and part.draws.cuts is None:
                factors_n = part.draws.inverse_temperature_n
                return self._on_cpu.weighed_and_drawn(
                    logits_nV, factors_n, width, width // BLOCK, starts_n, positions_n
                )
            top_n, weights_nW = candidate_weights(part.draws, logits_nV, self._on_cpu)
            if self._on_cpu is not None:
                token_ids_n = self._on_cpu.draw(weights_nW, width // BLOCK, starts_n, positions_n)
            else:
                token_ids_n = draw(weights_nW, uniforms(starts_n, positions_n))
        # The maximum of a row with a NaN is NaN, so one test on n numbers covers the vocabulary.
        finite_n = top_n.abs() < torch.inf
        if raw_top_n is not None:
            finite_n &= raw_top_n.abs() < torch.inf
        return torch.where(finite_n, token_ids_n, -1)

    def _adjusted(self, adjustments: Adjustments, logits_nV: Tensor) -> Tensor:
        """Return a float32 copy of the logits with bias, penalties and suppressed stop tokens."""
        logits_nV = logits_nV.to(torch.float32, copy=True)
        if adjustments.bias_at is not None and adjustments.bias is not None:
            logits_nV.view(-1).index_add_(0, adjustments.bias_at, adjustments.bias)
        if adjustments.penalties is not None:
            adjustments.penalties.apply(logits_nV, self._state.counts)
        if adjustments.hold_at is not None:
            # The lowest finite number, not -inf: a row that allows only EOS then ends instead of failing.
            logits = logits_nV.view(-1)
            held = logits.index_select(0, adjustments.hold_at)
            # A forbidden token stays at -inf.
            held = torch.where(held.isfinite(), torch.finfo(torch.float32).min, held)
            logits.index_copy_(0, adjustments.hold_at, held)
        return logits_nV


def _replaced(logits_NV: Tensor, scaled: Sequence[tuple[slice | Tensor, Tensor]]) -> Tensor:
    """Return the logits with those of some rows replaced, float32; the same tensor if there are none."""
    if not scaled:
        return logits_NV
    are_all = sum(len(scores_nV) for _, scores_nV in scaled) == len(logits_NV)
    if are_all and len(scaled) == 1 and isinstance(scaled[0][0], slice):
        return scaled[0][1]
    replaced_NV = (
        torch.empty_like(logits_NV, dtype=torch.float32) if are_all else logits_NV.to(torch.float32, copy=True)
    )
    for at, scores_nV in scaled:
        replaced_NV[at] = scores_nV
    return replaced_NV


def candidate_scores(
    draws: Draws, logits_nV: Tensor, drawn_n1: Tensor | None, on_cpu: "CPUKernels | None" = None
) -> Tensor:
    """Return scores_nW, the logarithms of candidate weights up to a number per row; -inf in what is cut.

    drawn_n1: a token of each row that is not cut."""
    _, scores_nW, weights_nW = _weighed(draws, logits_nV, on_cpu, with_weights=draws.cuts is not None)
    if draws.cuts is not None:
        assert weights_nW is not None, "cuts need weights"
        cut_nW = scores_nW < lowest_kept(scores_nW, weights_nW, draws.cuts)
        scores_nW.masked_fill_(cut_nW if drawn_n1 is None else cut_nW.scatter_(1, drawn_n1, False), -torch.inf)
    return scores_nW


def candidate_weights(draws: Draws, logits_nV: Tensor, on_cpu: "CPUKernels | None" = None) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and weights_nW, to which draws are proportional, after temperature and cuts."""
    top_n, scores_nW, weights_nW = _weighed(draws, logits_nV, on_cpu)
    assert weights_nW is not None, "they are asked for"
    if draws.cuts is not None:
        weights_nW.masked_fill_(scores_nW < lowest_kept(scores_nW, weights_nW, draws.cuts), 0.0)
    return top_n, weights_nW


def _weighed(
    draws: Draws, logits_nV: Tensor, on_cpu: "CPUKernels | None", *, with_weights: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each row's largest logit, its scores and its weights."""
    if on_cpu is not None:
        width = padded_width(logits_nV.shape[1])
        return on_cpu.weighed(logits_nV, draws.inverse_temperature_n, width, with_weights=with_weights)
    top_n = logits_nV.amax(dim=-1)
    scores_nW = padded_scores(logits_nV, top_n, draws.inverse_temperature_n)
    return top_n, scores_nW, weights(scores_nW) if with_weights else None


def _upload(values: Int64, device: torch.device) -> Tensor:
    # From a copy: the caller's array may be read-only, or change before the device has read it.
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device, non_blocking=True)


def _kernel_sampler(state: SamplingState) -> "KernelSampler":
    from engine.sampling.triton.sampler import KernelSampler  # triton may be missing if torch samples

    return KernelSampler(state)
