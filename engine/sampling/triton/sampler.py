"""The sampler in kernels: two launches for a batch without cuts and adjustments, whatever its temperatures.

    logits -> (adjusted) -> blocks -> picks -> (candidates)

Legend: N sampled rows of the batch · n rows of a part · r rows of it with cuts · V vocabulary
Owns: the one copy of a batch's parameters to the device, the order of launches.
Does not know: logits, the content of kernels, when a batch is built anew.

Adjusted rows, and rows with cuts, take memory per vocabulary entry, so only some are processed at a time.
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

# Most tokens of rows that need memory of their own: 134 MB for candidates, half of that for adjusted logits.
TOKENS_AT_ONCE: Final = 1 << 24

Int64 = npt.NDArray[np.int64]


class KernelSampler:
    """Picks the tokens of one rank's batches, by the rules of ``engine/sampling/sampler.py``."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def plan(self, rows_N: Int64, holding_N: npt.NDArray[np.bool_]) -> tuple[KernelPart, ...]:
        """Return a batch's parts for ``pick``, valid until one of its rows changes; see ``build_batch``."""
        state = self._state
        adjusted_N = state.adjusted(rows_N, holding_N)
        plain, adjusted = np.flatnonzero(~adjusted_N), np.flatnonzero(adjusted_N)
        parts = [plan_part(state, rows_N, holding_N, plain, adjusted=False)] if len(plain) else []
        at_once = rows_at_once(state.vocab_size)
        for start in range(0, len(adjusted), at_once):
            parts.append(plan_part(state, rows_N, holding_N, adjusted[start : start + at_once], adjusted=True))
        return place(parts, state.device)

    def pick(self, parts: tuple[KernelPart, ...], logits_NV: Tensor, positions_N: Tensor | None) -> Tensor:
        """Return a token per row of the batch, int64; -1 if a row's logits have no finite maximum.

        logits_NV: any floating-point dtype; there may be gaps between rows.  positions_N: int64, the position of each
        token; None if all rows are greedy.  Nothing here depends on the content of tensors, so it can be captured.
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
    """Return the number of rows that may take memory per vocabulary entry at the same time."""
    return max(1, TOKENS_AT_ONCE // vocab_size)
