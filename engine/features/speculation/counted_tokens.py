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
    """Counts that only the device knows.  lengths_R: int32, of keys and values.  lacking_R: int64, of the draft.

    before_R: lengths_R before the last step of which only the device knew them."""

    lengths_R: Tensor
    lacking_R: Tensor
    before_R: Tensor


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step's drafts.  ends_B: numbers of known tokens; None if only the device has them, in the next.

    at_BD: places of drafted tokens in the flat token table, and others behind those of a row."""

    rows_B: Int32
    counts_B: npt.NDArray[np.int64]
    ends_B: Int32 | None
    counted_ends_B: Tensor | None
    at_BD: Tensor
    said_BD: Tensor


class CountedTokens:
    """The counts.  rows: the model's.  num_tokens: D."""

    def __init__(self, rows: DeviceRows, num_tokens: int) -> None:
        self._rows = rows
        self._nth_D = np.arange(num_tokens, dtype=np.int64)
        self._counts: RowCounts | None = None
        self._begun: _Begun | None = None

    def keep(self) -> RowCounts:
        """Return the counts, kept from now on."""
        if self._counts is None:
            lengths_R = self._rows.keep_lengths()
            lacking_R = torch.zeros_like(lengths_R, dtype=torch.int64)
            self._counts = RowCounts(lengths_R, lacking_R, torch.zeros_like(lengths_R))
        return self._counts

    def begin(self, rows_B: Int32, ends_B: Int32 | None, counts_B: npt.NDArray[np.int64]) -> Tensor:
        """Return the drafted tokens, int32[B, D], before their step.  ends_B: numbers of known tokens; None if counted.

        counts_B: numbers of drafted tokens, 0 for a row whose tokens do not count whatever they are."""
        flat = self._rows.tokens_RM.view(-1)
        counted_ends_B = None
        at_BD = rows_B.astype(np.int64)[:, None] * self._rows.tokens_RM.shape[1] + self._nth_D
        if ends_B is not None:
            # A place that is not drafted may lie behind the table.
            at = self._rows.upload(np.minimum(at_BD + ends_B[:, None], len(flat) - 1).reshape(-1))
        else:
            assert self._counts is not None, "no lengths are kept"
            rows, first = self._rows.upload(np.stack((rows_B.astype(np.int64), at_BD[:, 0])))
            nth_D = self._rows.upload(self._nth_D)
            counted_ends_B = self._counts.lengths_R.index_select(0, rows) + 1
            at = ((first + counted_ends_B)[:, None] + nth_D).clamp_(max=len(flat) - 1).view(-1)
        said_BD = flat.index_select(0, at).view(at_BD.shape)
        self._begun = _Begun(rows_B, counts_B, ends_B, counted_ends_B, at, said_BD)
        return said_BD

    def put(self, rows_B: Int32, ends_B: Int32 | None) -> None:
        """Note numbers of known tokens of rows that have been drafted for without a result: none was right.

        ends_B: None if only the device has them: each row has one more than before its step."""
        self._begun = None
        if (counts := self._counts) is None:
            return
        if ends_B is None:
            rows = self._rows.upload(rows_B.astype(np.int64))
            counts.lengths_R.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))
        else:
            rows, lengths = self._rows.upload(np.stack((rows_B, ends_B)).astype(np.int64))
            counts.lengths_R.index_copy_(0, rows, lengths.to(torch.int32))

    def note(self) -> None:
        """Note the lengths before a step of which only the device knows them."""
        assert self._counts is not None, "no lengths are kept"
        self._counts.before_R.copy_(self._counts.lengths_R)

    def read(self) -> Int32:
        """Return to the lengths of the last ``note``.  Wait for the device, and return them, of all rows."""
        assert self._counts is not None, "no lengths are kept"
        self._counts.lengths_R.copy_(self._counts.before_R)
        lengths_R: Int32 = self._counts.before_R.cpu().numpy()
        return lengths_R

    def end(self, lacking: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compare the drafted tokens with those that their step has sampled in their places.

        lacking: returns how many tokens the draft lacks, from numbers of drafted tokens and of right ones."""
        if (begun := self._begun) is None or (counts := self._counts) is None:
            return
        self._begun = None
        known_B = begun.counts_B if begun.ends_B is None else begun.ends_B
        rows, num_B, given_B = self._rows.upload(np.stack((begun.rows_B, begun.counts_B, known_B)).astype(np.int64))
        ends_B = given_B if begun.counted_ends_B is None else begun.counted_ends_B
        found_BD = self._rows.tokens_RM.view(-1).index_select(0, begun.at_BD).view(begun.said_BD.shape)
        is_right_BD = found_BD == begun.said_BD
        # What is behind a row's drafted tokens may be equal too.
        right_B = torch.minimum(is_right_BD.cumprod(1).sum(1), num_B)
        counts.lengths_R.index_copy_(0, rows, (ends_B + right_B).to(torch.int32))
        counts.lacking_R.index_copy_(0, rows, lacking(num_B, right_B))
