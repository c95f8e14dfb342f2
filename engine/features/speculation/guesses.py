"""What may follow each row's known tokens, and how often such guesses have been right.

Owns: the sessions of a proposer, each row's guess, and its comparison with the tokens that come.
Does not know: what a step verifies.

A guess is kept and compared with the tokens as they come, whether steps verify it or not: what speculation would bring
is known before it begins, and text that nobody can guess is decoded as if there were no proposer.
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

IN_FLIGHT = 1  # a token that is being sampled while it is decided whether guesses behind it are worth waiting for
TOLD_AT_ONCE = 512  # tokens of all long prompts together, so that other requests do not wait for their sessions


class Guesses(Protocol):
    """Of one planner's rows.  num_tokens: the most that are guessed for a row.
    free: a guess costs nothing, so it may be verified before it is known what decoding costs.
    rest: nobody is to be asked now; speculation has not been worth it a moment ago."""

    num_tokens: int
    free: bool

    @property
    def rest(self) -> bool: ...

    def chance(self, row: int, ahead: int) -> Chance | None:
        """What is guessed for the row, behind ``ahead`` tokens that are not known yet; None if nothing is."""
        ...

    def of(self, row: int, count: int) -> tuple[int, ...]:
        """The first so many guessed tokens, or ``DRAFTED`` in the place of each."""
        ...

    def reads_first(self, row: int) -> bool:
        """Whether more than the guess is computed for the row's next one, so that the step tells nothing of costs."""
        ...

    def probe(self, chances: dict[int, Chance]) -> int | None:
        """A row to speculate for although it does not seem to pay, so that it is found out when it would."""
        ...

    def decided(self, *, pays: bool) -> None:
        """Whether speculation is expected to pay in the next step."""
        ...

    def verified(self, row: int, num_proposed: int, num_right: int) -> None:
        """A step has verified so many for the row."""
        ...

    def stepped(self, *, drafted: bool) -> None:
        """A step has completed.  drafted: it has verified something."""
        ...

    def told(self, row: int) -> None:
        """The row has new tokens."""
        ...

    def leave(self, row: int) -> None:
        """The row ends, or goes back to the queue."""
        ...

    def clear(self) -> None:
        """Nobody runs."""
        ...


@dataclass(slots=True)
class _Line:
    """A row's session, None where it does not speculate.  guess: what may follow the ``num_told`` tokens."""

    session: ProposerSession | None
    num_told: int = 0
    guess: list[int] = field(default_factory=list)
    hit_rate: HitRate = field(default_factory=HitRate)


class SessionGuesses:
    """See ``Guesses``: a proposer's, which cost the device nothing.  vocab_size: of the model."""

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
        """The unknown tokens must be as guessed, too."""
        line = self._lines.get(row)
        if line is None or not line.guess:
            return None
        return Chance(line.hit_rate.share, min(len(line.guess), self.num_tokens + ahead), ahead)

    def of(self, row: int, count: int) -> tuple[int, ...]:
        return tuple(self._lines[row].guess[:count])

    def reads_first(self, row: int) -> bool:
        """Never: a session has read all tokens."""
        return False

    def probe(self, chances: dict[int, Chance]) -> int | None:
        """Never: what is not verified is compared as well."""
        return None

    def decided(self, *, pays: bool) -> None:
        """It costs nothing to ask again."""

    def verified(self, row: int, num_proposed: int, num_right: int) -> None:
        """Guesses are compared with all tokens, not only by steps."""

    def stepped(self, *, drafted: bool) -> None:
        """Its tokens are told next."""
        self._num_to_tell = TOLD_AT_ONCE

    def told(self, row: int) -> None:
        """Compare its guess with them, and ask for another one."""
        line = self._lines.get(row)
        if line is None:
            line = self._lines[row] = _Line(self._open(row))
        if line.session is None:
            return
        known = int(self._table.num_known[row])
        # At least what a step brings: who knows all but that has a guess to compare.
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
        except BaseException:  # of a plugin, sys.exit as well, which would end the server
            log.exception("the proposer failed; its request goes on without it")
            line.session, line.guess = None, []

    def _open(self, row: int) -> ProposerSession | None:
        if not may_speculate(self._table.params_of(row)):
            return None
        try:
            return self._proposer.open()
        except BaseException:  # as above
            log.exception("the proposer failed; a request goes on without it")
            return None

    def _sane(self, proposed: Sequence[int]) -> list[int]:
        """What the model could say of it."""
        tokens: list[int] = []
        for token in proposed[: self.num_tokens + IN_FLIGHT]:
            if not 0 <= token < self._vocab_size:
                break
            tokens.append(int(token))
        return tokens

    def leave(self, row: int) -> None:
        """Its session is of no use any more."""
        self._lines.pop(row, None)

    def clear(self) -> None:
        """Likewise all of them."""
        self._lines.clear()


def may_speculate(params: SamplingParams) -> bool:
    """Whether what is sampled at a position depends on the tokens before it through the model alone."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    limits = params.grammar or params.limits_tokens or params.logits_processors
    return penalties == (1.0, 0.0, 0.0) and not limits and not params.pooling and not params.logprob_token_ids
