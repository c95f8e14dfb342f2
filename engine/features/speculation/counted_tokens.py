"""The drafted tokens that were right, counted on the device, which so knows rows' lengths before the host does.

Legend: R rows · B rows that are drafted for · D most drafted tokens of a row
Owns: the lengths and what a draft lacks of each row, from a step's drafts to the next.  Does not know: passes, plans.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.batch import Int32
from engine.execution.rows import DeviceRows

BY_DEVICE = -1  # in place of a length that only the device knows


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts that only the device knows.  lengths_R: int32, of keys and values.  lacking_R: int64, of the draft."""

    lengths_R: Tensor
    lacking_R: Tensor


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step's drafts.  ends_B: number of known tokens.  at_BD: places of drafted tokens in the flat token table."""

    rows_B: Tensor
    counts_B: Tensor
    ends_B: Tensor
    at_BD: Tensor
    said_BD: Tensor


class CountedTokens:
    """The counts.  rows: the model's.  num_tokens: D."""

    def __init__(self, rows: DeviceRows, num_tokens: int) -> None:
        self._rows = rows
        self._num_tokens = num_tokens
        self._counts: RowCounts | None = None
        self._begun: _Begun | None = None

    def keep(self) -> RowCounts:
        """Return the counts, kept from now on."""
        if self._counts is None:
            lengths_R = self._rows.keep_lengths()
            self._counts = RowCounts(lengths_R, torch.zeros_like(lengths_R, dtype=torch.int64))
        return self._counts

    def begin(self, rows_B: Int32, ends_B: Int32 | None, counts_B: npt.NDArray[np.int64]) -> Tensor:
        """Return the drafted tokens, int32[B, D], before their step.  ends_B: numbers of known tokens; None if counted.

        counts_B: numbers of drafted tokens, 0 for a row whose tokens do not count whatever they are."""
        known_B = np.zeros(len(rows_B), dtype=np.int64) if ends_B is None else ends_B.astype(np.int64)
        rows, given, counts = self._rows.upload(np.stack((rows_B.astype(np.int64), known_B, counts_B)))
        if ends_B is None:
            assert self._counts is not None, "no lengths are kept"
            given = self._counts.lengths_R.index_select(0, rows) + 1
        tokens_RM = self._rows.tokens_RM
        nth_D = torch.arange(self._num_tokens, device=rows.device)
        # A place that is not drafted may lie behind the table.
        at_BD = torch.where(nth_D < counts[:, None], (rows * tokens_RM.shape[1] + given)[:, None] + nth_D, 0)
        said_BD = tokens_RM.view(-1).index_select(0, at_BD.view(-1)).view_as(at_BD)
        self._begun = _Begun(rows, counts, given, at_BD, said_BD)
        return said_BD

    def end(self, lacking: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compare the drafted tokens with those that their step has sampled in their places.

        lacking: returns how many tokens the draft lacks, from numbers of drafted tokens and of right ones."""
        if (begun := self._begun) is None or (counts := self._counts) is None:
            return
        self._begun = None
        found_BD = self._rows.tokens_RM.view(-1).index_select(0, begun.at_BD.view(-1)).view_as(begun.at_BD)
        nth_D = torch.arange(self._num_tokens, device=found_BD.device)
        is_right_BD = (found_BD == begun.said_BD) & (nth_D < begun.counts_B[:, None])
        right_B = is_right_BD.to(torch.int64).cumprod(1).sum(1)
        counts.lengths_R.index_copy_(0, begun.rows_B, (begun.ends_B + right_B).to(torch.int32))
        counts.lacking_R.index_copy_(0, begun.rows_B, lacking(begun.counts_B, right_B))
