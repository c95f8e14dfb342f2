"""Guesses of the tokens after each row's known ones, and how often such guesses have been right.

Owns: the sessions of a proposer, each row's guess, and its comparison with the tokens that come.
Does not know: what a step verifies.

A guess is kept and compared with the tokens as they come, whether steps verify it or not: so the gain of speculation
is known before it begins, and text that cannot be guessed is decoded as if there were no proposer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.features.speculation.payoff import Chance, HitRate
from engine.scheduling.proposer import Proposer, ProposerSession
from engine.scheduling.rows import RowTable
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

IN_FLIGHT = 1  # a token that is being sampled while it is decided whether guesses after it are worth waiting for
TOLD_AT_ONCE = 512  # tokens of all long prompts together, so that other requests do not wait for their sessions


class Guesses(Protocol):
    """The guesses for one planner's rows.

    num_tokens: the most tokens guessed for a row.
    free: a guess costs nothing, so it may be verified before the cost of decoding is known.
    rest: do not call ``chance`` now; speculation was not worth it a moment ago."""

    num_tokens: int
    free: bool

    @property
    def rest(self) -> bool: ...

    def chance(self, row: int, ahead: int) -> Chance | None:
        """Return the row's guess, after ``ahead`` tokens that are not known yet; None if there is none."""
        ...

    def of(self, row: int, count: int) -> tuple[int, ...]:
        """Return the first so many guessed tokens, or ``DRAFTED`` in the place of each."""
        ...

    def reads_first(self, row: int) -> bool:
        """Return whether the row's next guess costs more than the guess, so that its step is no measure of costs."""
        ...

    def probe(self, chances: dict[int, Chance]) -> int | None:
        """Return a row to speculate for although it does not seem to pay, so that a change is noticed; None if none."""
        ...

    def decided(self, *, pays: bool) -> None:
        """Note whether speculation is expected to pay in the next step."""
        ...

    def verified(self, row: int, num_proposed: int, num_right: int) -> None:
        """Note the proposals that a step has verified for the row."""
        ...

    def stepped(self, *, drafted: bool) -> None:
        """Note that a step has completed.  drafted: it has verified proposals."""
        ...

    def tokens_added(self, row: int) -> None:
        """Read the row's new tokens."""
        ...

    def leave(self, row: int) -> None:
        """Forget a row that ends or goes back to the queue."""
        ...

    def clear(self) -> None:
        """Forget all rows."""
        ...


@dataclass(slots=True)
class _Line:
    """A row's session, None if it does not speculate.  guess: the guess of what follows ``num_told`` tokens."""

    session: ProposerSession | None
    num_told: int = 0
    guess: list[int] = field(default_factory=list)
    hit_rate: HitRate = field(default_factory=HitRate)


class SessionGuesses:
    """The guesses of a proposer's sessions, which cost the device nothing.  vocab_size: that of the model."""

    free = True
    rest = False

    def __init__(self, table: RowTable, proposer: Proposer, vocab_size: int) -> None:
        self.num_tokens = proposer.num_tokens
        self._table = table
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._lines: dict[int, _Line] = {}
        self._num_to_tell = TOLD_AT_ONCE

    def chance(self, row: int, ahead: int) -> Chance | None:
        """Return the row's guess; the unknown tokens must be as guessed, too."""
        line = self._lines.get(row)
        if line is None or not line.guess:
            return None
        return Chance(line.hit_rate.share, min(len(line.guess), self.num_tokens + ahead), ahead)

    def of(self, row: int, count: int) -> tuple[int, ...]:
        return tuple(self._lines[row].guess[:count])

    def reads_first(self, row: int) -> bool:
        """Return False: a session has read all tokens."""
        return False

    def probe(self, chances: dict[int, Chance]) -> int | None:
        """Return None: guesses are compared with the tokens even if no step verifies them."""
        return None

    def decided(self, *, pays: bool) -> None:
        """Do nothing: another look costs nothing."""

    def verified(self, row: int, num_proposed: int, num_right: int) -> None:
        """Do nothing: guesses are compared with all tokens, not only by steps."""

    def stepped(self, *, drafted: bool) -> None:
        """Renew the number of tokens that sessions may read in a step."""
        self._num_to_tell = TOLD_AT_ONCE

    def tokens_added(self, row: int) -> None:
        """Compare the row's guess with its new tokens, and request another guess."""
        line = self._lines.get(row)
        if line is None:
            line = self._lines[row] = _Line(self._open(row))
        if line.session is None:
            return
        known = int(self._table.num_known[row])
        # At least as many as a step brings: a session that lacks only those has a guess to compare.
        until = min(known, line.num_told + max(self._num_to_tell, self.num_tokens + 1 + IN_FLIGHT))
        self._num_to_tell -= until - line.num_told
        tokens: list[int] = self._table.tokens[row, line.num_told : until].tolist()
        for token in tokens[: len(line.guess)]:
            is_hit = token == line.guess.pop(0)
            line.hit_rate.note(is_hit=is_hit)
            if not is_hit:
                line.guess.clear()
                break
        line.num_told = until
        try:
            line.session.extend(tokens)
            if until == known and not line.guess:
                line.guess = self._sane(line.session.propose(self.num_tokens + IN_FLIGHT))
        except BaseException:  # a plugin's, including sys.exit, which would end the server
            log.exception("the proposer failed; its request goes on without it")
            line.session, line.guess = None, []

    def _open(self, row: int) -> ProposerSession | None:
        if not may_speculate(self._table.params_of(row)):
            return None
        try:
            return self._proposer.open()
        except BaseException:  # a plugin's, including sys.exit
            log.exception("the proposer failed; a request goes on without it")
            return None

    def _sane(self, proposed: Sequence[int]) -> list[int]:
        """Return the proposed tokens up to the first one that the model does not have."""
        tokens: list[int] = []
        for token in proposed[: self.num_tokens + IN_FLIGHT]:
            if not 0 <= token < self._vocab_size:
                break
            tokens.append(int(token))
        return tokens

    def leave(self, row: int) -> None:
        """Forget the row and its session."""
        self._lines.pop(row, None)

    def clear(self) -> None:
        """Forget all rows and their sessions."""
        self._lines.clear()


def may_speculate(params: SamplingParams) -> bool:
    """Return whether a token that is sampled depends on the tokens before it through the model alone."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    limits = params.grammar or params.limits_tokens or params.logits_processors
    return penalties == (1.0, 0.0, 0.0) and not limits and params.generates and not params.logprob_token_ids
