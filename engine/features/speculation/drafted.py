"""Guesses that a draft model makes on the executors, in the step that verifies them.

Owns: how often they have been right, and when a model that does not seem to help is tried again.
Does not know: models, tokens: it knows only the length of a guess.

Such a guess costs a step some passes of the draft model, so none is made that is not verified.  The worth of a row's
guesses is estimated from its own, and for a new row from those of all rows.  If they are worth nothing, one row is
tried now and then, ever more rarely.
"""

from engine.features.speculation.guesses import may_speculate
from engine.features.speculation.messages import DRAFTED
from engine.features.speculation.payoff import Chance, HitRate
from engine.scheduling.proposer import DraftModel
from engine.scheduling.rows import RowTable

PRIOR_WEIGHT = 4.0  # weight of all rows' guesses in a row's own rate
PAUSE = 16  # steps between two looks at whether it would pay
FIRST_PATIENCE, LONGEST_PATIENCE = 64, 4096  # steps until a row is tried


class DraftedGuesses:
    """The guesses of a draft model, which costs passes on the device."""

    free = False

    def __init__(self, table: RowTable, draft: DraftModel) -> None:
        self.num_tokens = draft.num_tokens
        self._max_len = draft.max_len
        self._table = table
        self._everybody = HitRate(3.0, 1.0)
        # Rows in the order in which they were last drafted for, the longest ago first; None for rows that never are.
        self._lines: dict[int, HitRate | None] = {}
        self._num_idle = 0
        self._asleep_until = 0
        self._patience = FIRST_PATIENCE

    @property
    def rest(self) -> bool:
        return self._num_idle < self._asleep_until

    def chance(self, row: int, ahead: int) -> Chance | None:
        """Return the row's guess.  It is made after the tokens ahead are known, so they need not be guessed."""
        own = self._lines.get(row)
        num = min(self.num_tokens, self._max_len - int(self._table.num_known[row]) - ahead)
        if own is None or num <= 0:
            return None
        hits = own.hits + PRIOR_WEIGHT * self._everybody.share
        return Chance(hits / (own.hits + own.misses + PRIOR_WEIGHT), num + ahead)

    def of(self, row: int, count: int) -> tuple[int, ...]:
        """Return so many ``DRAFTED``, and put the row last in the order of trials."""
        self._lines[row] = self._lines.pop(row)
        return (DRAFTED,) * count

    def reads_first(self, row: int) -> bool:
        """Return whether the draft model has not read the row's prompt."""
        own = self._lines[row]
        return own is not None and not own.hits + own.misses

    def probe(self, chances: dict[int, Chance]) -> int | None:
        """Return the row that has waited the longest, if it is time for a trial."""
        if self._num_idle < self._patience:
            return None
        return next((row for row in self._lines if row in chances and chances[row].num > 0), None)

    def decided(self, *, pays: bool) -> None:
        """Wait longer from trial to trial while speculation does not pay."""
        if pays:
            self._patience = FIRST_PATIENCE
            return
        if not self._num_idle:  # it has just been tried
            self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        self._asleep_until = self._num_idle + PAUSE

    def verified(self, row: int, num_proposed: int, num_right: int) -> None:
        """Count the proposals up to the first wrong one; those after it mean nothing."""
        own = self._lines.get(row)
        for nth in range(min(num_right + 1, num_proposed)):
            for rate in (own, self._everybody):
                if rate is not None:
                    rate.note(is_hit=nth < num_right)

    def stepped(self, *, drafted: bool) -> None:
        """Count the steps without proposals."""
        self._num_idle = 0 if drafted else self._num_idle + 1
        if drafted:
            self._asleep_until = 0

    def tokens_added(self, row: int) -> None:
        """Let a new row speculate from now on, if its parameters allow it."""
        if row not in self._lines:
            allowed = may_speculate(self._table.params_of(row))
            self._lines[row] = HitRate(0.0, 0.0) if allowed else None

    def leave(self, row: int) -> None:
        """Forget a row.  Its guesses still count in the rate of all rows."""
        self._lines.pop(row, None)

    def clear(self) -> None:
        """Forget all rows.  Their guesses still count in the rate of all rows."""
        self._lines.clear()
