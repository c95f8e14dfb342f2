"""The sampler's parts as kernels: two launches for a batch without cuts and adjustments, whatever its temperatures.

    logits -> (adjusted) -> blocks -> picks -> (candidates)

Legend: N sampled rows of the batch · n rows of a part · r rows of it with cuts · V vocabulary
Owns: the one copy of a batch's parameters to the device, the order of launches.
Does not know: logits, kernels' insides, when a batch is built anew.

Adjusted rows, and of all parts those with cuts, take memory by the vocabulary, so only some are worked on at a time.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.state import SamplingState
from engine.sampling.triton.adjusted import adjusted_logits
from engine.sampling.triton.blocks import measure_blocks
from engine.sampling.triton.candidates import pick_candidates
from engine.sampling.triton.parts import KernelPart, place, plan_part
from engine.sampling.triton.picks import pick

# Most tokens of rows that take memory of their own: 134 MB for candidates, half of that for adjusted logits.
TOKENS_AT_ONCE: Final = 1 << 24

Int64 = npt.NDArray[np.int64]


class KernelSampler:
    """Picks the tokens of one rank's batches; ``engine/sampling/sampler.py`` says by which rules."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def plan(self, rows_N: Int64, holding_N: npt.NDArray[np.bool_]) -> tuple[KernelPart, ...]:
        """The parts that ``pick`` takes for a batch, until one of its rows changes; see ``build_batch``."""
        state = self._state
        adjusted_N = state.adjusted(rows_N, holding_N)
        plain, adjusted = np.flatnonzero(~adjusted_N), np.flatnonzero(adjusted_N)
        parts = [plan_part(state, rows_N, holding_N, plain, adjusted=False)] if len(plain) else []
        at_once = rows_at_once(state.vocab_size)
        for start in range(0, len(adjusted), at_once):
            parts.append(plan_part(state, rows_N, holding_N, adjusted[start : start + at_once], adjusted=True))
        return place(parts, state.device)

    def pick(self, parts: tuple[KernelPart, ...], logits_NV: Tensor, positions_N: Tensor | None) -> Tensor:
        """Token per row of the batch, int64; -1 where a row's logits have no finite maximum.

        logits_NV: any floating-point dtype, rows may be apart.  positions_N: int64, the position each token will
        have; None if all rows are greedy.  Nothing here depends on what tensors hold, so it can be captured.
        """
        token_ids_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        for part in parts:
            logits, at_n = logits_NV, part.at_n
            if part.adjustment is not None:
                logits = adjusted_logits(logits_NV, part.at_n, self._state.counts.table_CV, part.adjustment)
                at_n = part.own_n
            blocks = measure_blocks(logits, at_n, part.inverse_temperature_n, with_sums=part.draws)
            bounds = pick(logits, at_n, part, blocks, positions_N if part.draws else None, token_ids_N)
            if bounds is None:
                continue
            assert positions_N is not None, "rows with cuts are random"
            num_cut, at_once = len(bounds.top_r), rows_at_once(logits.shape[1])
            for first in range(0, num_cut, at_once):
                last = min(first + at_once, num_cut)
                pick_candidates(logits, at_n, part, positions_N, bounds, first, last, token_ids_N)
        return token_ids_N


def rows_at_once(vocab_size: int) -> int:
    """Rows that may take memory by the vocabulary at the same time."""
    return max(1, TOKENS_AT_ONCE // vocab_size)
