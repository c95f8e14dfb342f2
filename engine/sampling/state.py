"""What every row's current sequence asked of the sampler.

Owns: one line of host arrays per row, overwritten as a whole when a sequence takes the row; token counts.
Does not know: logits, batches, why rows change hands.

Arrays hold what samplers compute with, derived here and nowhere else, whether torch, kernels or a captured step sample.
A parameter that rules out tokens by how far they are below the most likely one is one more bound in ``floor``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.params import SamplingParams
from engine.sampling.penalties import TokenCounts

# Below this the most likely token is taken: 1 / temperature would push every other weight to 0 in float32 or
# overflow, so the two cannot be told apart.
GREEDY_TEMPERATURE: Final = 1e-5
NO_LOGPROBS: Final = -1
_NO_CUTS: Final = (0, 1.0, np.inf)

TokenIds = npt.NDArray[np.int64]
_NO_BIAS: Final = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence that takes a row.  token_ids: its prompt, then output kept over a retraction."""

    row: int
    params: SamplingParams
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int


class SamplingState:
    """Parameters by row, and ``version``, which changes whenever any row does."""

    def __init__(self, max_rows: int, vocab_size: int, max_len: int, device: torch.device) -> None:
        self.version = 0
        self.vocab_size = vocab_size
        self.device = device
        self.counts = TokenCounts(max_rows, vocab_size, max_len, device)
        self.greedy = np.ones(max_rows, dtype=np.bool_)
        self.penalised = np.zeros(max_rows, dtype=np.bool_)
        self.inverse_temperature = np.zeros(max_rows, dtype=np.float32)  # 0 is greedy
        self.cut = np.zeros(max_rows, dtype=np.bool_)  # whether one of the next three is on; of greedy rows, none is
        self.top_k = np.zeros(max_rows, dtype=np.int32)  # 0 is off
        self.top_p = np.ones(max_rows, dtype=np.float64)  # 1 is off
        self.floor = np.full(max_rows, np.inf, dtype=np.float32)  # magnitude of the lowest score that may be drawn
        self.repetition = np.ones(max_rows, dtype=np.float32)
        self.presence = np.zeros(max_rows, dtype=np.float32)
        self.frequency = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self.biased = np.zeros(max_rows, dtype=np.bool_)
        self.bias: list[tuple[TokenIds, npt.NDArray[np.float32]]] = [_NO_BIAS] * max_rows
        # A token at a position below ``stop_from`` must not be one of ``stop_ids``.
        self.stop_from = np.zeros(max_rows, dtype=np.int64)
        self.stop_ids: list[TokenIds] = [_NO_BIAS[0]] * max_rows

    def admit(
        self,
        row: int,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """A sequence takes a row; see ``Newcomer``."""
        self.admit_all((Newcomer(row, params, token_ids, num_prompt_tokens),), eos_token_ids)

    def admit_all(self, newcomers: Sequence[Newcomer], eos_token_ids: Sequence[int]) -> None:
        """Sequences take rows, each another one."""
        self.version += 1
        for one in newcomers:
            row, params = one.row, one.params
            self._admit_draw(row, params)
            self.seed[row] = params.seed or 0
            self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
            self._admit_bias(row, params)
            self._admit_stops(row, params, one.num_prompt_tokens, eos_token_ids)
            self._admit_penalties(row, params)
        self.counts.hold([one for one in newcomers if self.penalised[one.row]])

    def _admit_draw(self, row: int, params: SamplingParams) -> None:
        self.greedy[row] = greedy = params.temperature < GREEDY_TEMPERATURE
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
        # With ignore_eos an EOS token does not end the sequence, so there is nothing to hold off.
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.stop_ids[row] = np.array(sorted(ids), dtype=np.int64)
        self.stop_from[row] = num_prompt_tokens + params.min_tokens if ids else 0

    def _admit_penalties(self, row: int, params: SamplingParams) -> None:
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.penalised[row] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.counts.release(row)

    def adjusted(self, rows_N: TokenIds, holding_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether a row has bias, penalties or stop tokens that are held off.  holding_N: the latter."""
        adjusted_N: npt.NDArray[np.bool_] = self.biased[rows_N] | self.penalised[rows_N] | holding_N
        return adjusted_N
