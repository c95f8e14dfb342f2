"""What every row's current sequence asked of the sampler.

Owns: one line of host arrays per row, overwritten as a whole when a sequence takes the row; token counts.
Does not know: logits, batches, why rows change hands.
"""

from collections.abc import Sequence
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

TokenIds = npt.NDArray[np.int64]


class SamplingState:
    """Parameters by row, and ``version``, which changes whenever any row does."""

    def __init__(self, max_rows: int, vocab_size: int, max_len: int, device: torch.device) -> None:
        self.version = 0
        self.vocab_size = vocab_size
        self.device = device
        self.counts = TokenCounts(max_rows, vocab_size, max_len, device)
        self.greedy = np.ones(max_rows, dtype=np.bool_)
        self.penalised = np.zeros(max_rows, dtype=np.bool_)
        self.temperature = np.ones(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)  # 0 is off
        self.top_p = np.ones(max_rows, dtype=np.float64)
        self.min_p = np.zeros(max_rows, dtype=np.float64)
        self.repetition = np.ones(max_rows, dtype=np.float32)
        self.presence = np.zeros(max_rows, dtype=np.float32)
        self.frequency = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self.biased = np.zeros(max_rows, dtype=np.bool_)
        self.bias: list[tuple[TokenIds, npt.NDArray[np.float32]]] = [_no_bias()] * max_rows
        # A token at a position below ``stop_from`` must not be one of ``stop_ids``.
        self.stop_from = np.zeros(max_rows, dtype=np.int64)
        self.stop_ids: list[TokenIds] = [_no_bias()[0]] * max_rows

    def admit(
        self,
        row: int,
        params: SamplingParams,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """A sequence takes a row.  token_ids: its prompt, then output kept over a retraction."""
        self.version += 1
        self.greedy[row] = params.temperature < GREEDY_TEMPERATURE
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed or 0
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._admit_bias(row, params)
        self._admit_stops(row, params, num_prompt_tokens, eos_token_ids)
        self._admit_penalties(row, params, token_ids, num_prompt_tokens)

    def _admit_bias(self, row: int, params: SamplingParams) -> None:
        self.biased[row] = bool(params.logit_bias)
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

    def _admit_penalties(
        self, row: int, params: SamplingParams, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int
    ) -> None:
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.penalised[row] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.counts.release(row)
        if self.penalised[row]:
            self.counts.hold(row, token_ids, num_prompt_tokens)


def _no_bias() -> tuple[TokenIds, npt.NDArray[np.float32]]:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
