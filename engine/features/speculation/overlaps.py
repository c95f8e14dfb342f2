"""Steps that verify proposals before the tokens of the step in front of them are known.

Owns: when that is possible, which rows such a step may draft for.  Does not know: what is proposed, how ranks count.

Ranks that draft and verify in graphs have the rows' lengths, and the tokens, on the device.  So a step that is planned
for the most that its rows may be by then runs behind the tokens that were right.  A row that has not been drafted for
in the step before is not drafted for: after some such steps, one is waited for, which may begin with it.
"""

import numpy as np

from engine.features.speculation.guesses import may_speculate
from engine.scheduling.feature import PlannerParts
from engine.scheduling.rows import Rows, Sequence
from engine.scheduling.step_builder import NO_ROWS
from engine.types.params import SamplingParams

MOST_IN_TURN = 16


class Overlaps:
    """The rows whose steps overlap.  num_tokens: the most proposals for a row.

    most_places: as in ``DraftedTokens``."""

    def __init__(self, parts: PlannerParts, num_tokens: int) -> None:
        self.most_places = 0
        self._parts = parts
        self._table = parts.table
        self._num_tokens = num_tokens
        self._rows: set[int] = set()  # of the last step that was planned here
        self._drafted: set[int] = set()  # of them
        self._num_in_turn = 0
        # Rows for which ranks sample on the host's positions, until another sequence has them.
        self._hindering: set[int] = set()

    def possible(self) -> bool:
        """Return whether a step can be planned now.  The steps in flight verify proposals."""
        table, rows, pages = self._table, self._parts.decodes.rows, self._parts.pages
        features = self._parts.features
        if not self._drafted or self._hindering or self._num_in_turn >= MOST_IN_TURN:
            return False
        if self._parts.prefills.may_go_on or features.verified_tokens or features.recomputed_tokens:
            return False
        if not len(rows) or len(rows) > self.most_places or not self._rows.issuperset(rows.tolist()):
            return False
        if pages.num_available <= len(rows) * (2 + self._num_tokens):
            return False
        return bool((table.num_planned[rows] + 2 <= table.max_total[rows]).all())

    def drafted(self, rows: Rows) -> list[int]:
        """Return the rows of a step that overlaps that may be drafted for."""
        return [row for row in rows.tolist() if row in self._drafted]

    def planned(self, rows: Rows, drafts: dict[int, tuple[int, ...]], *, overlaps: bool = False) -> None:
        """Note a step.  drafts: its proposals by row."""
        self._rows = set(rows.tolist())
        self._drafted = {row for row, proposed in drafts.items() if proposed}
        self._num_in_turn = self._num_in_turn + 1 if overlaps else 0

    def num_sampling(self, rows: Rows) -> Rows:
        """Return the most tokens of each row that the steps in flight may add."""
        sampled = [record.sampled_rows for record in self._parts.completions.in_flight]
        counts = np.bincount(np.concatenate((NO_ROWS, *sampled)), minlength=len(self._table.num_planned))
        return counts[rows].astype(rows.dtype)

    def started(self, sequence: Sequence) -> None:
        """Note a sequence that takes a row."""
        (self._hindering.discard if _is_plain(sequence.params) else self._hindering.add)(sequence.row)

    def left(self, row: int) -> None:
        """Forget a row."""
        self._rows.discard(row)
        self._drafted.discard(row)

    def clear(self) -> None:
        """Forget all rows, and what ranks can do: there will be others."""
        self._rows.clear()
        self._drafted.clear()
        self._hindering.clear()
        self.most_places = self._num_in_turn = 0


def _is_plain(params: SamplingParams) -> bool:
    """Return whether a sequence has its tokens sampled in graphs, by positions that the device knows."""
    wishes = params.reads_prompt or params.logprobs is not None or params.logit_bias or params.min_tokens
    return may_speculate(params) and not wishes
