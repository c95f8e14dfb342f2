"""The last turns of sessions, and the first token in which the next prompt of a session differs from them.

Owns: the tokens of these turns, within ``MOST_TOKENS`` and ``MOST_SESSIONS``.
Does not know: text, pages, what makes a session.
A session may have several conversations at once, as subagents are, so a prompt is compared with the turn that it shares
most tokens with.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec
import numpy as np

from engine.scheduling.rows import TokenIds

MOST_TOKENS: Final = 1 << 22  # of all sessions; those of the session that was unused for longest go first
TURN_TOKENS: Final = 256  # that a turn counts for besides its own, 1 KB: what objects take that keep it
MOST_SESSIONS: Final = 8192
MOST_TURNS: Final = 4  # of a session
NUM_SHOWN: Final = 24  # tokens on either side


class TurnDifference(msgspec.Struct, frozen=True):
    """The first token in which a prompt differs from a turn of its session.

    request_id: the turn's.  position: of the token.  num_left: tokens of the turn from there on.
    in_answer: whether the token belongs to the turn's own output.
    shared, was, now: int32[n], some tokens before it, of the turn from it on, and of the prompt from it on."""

    request_id: int
    position: int
    num_left: int
    in_answer: bool
    shared: bytes
    was: bytes
    now: bytes


class SessionTurn(NamedTuple):
    """A request that has ended.  tokens: its prompt, and its output without the last token."""

    request_id: int
    num_prompt: int
    tokens: TokenIds

    @property
    def size(self) -> int:
        """Number of tokens that take as much memory."""
        return len(self.tokens) + TURN_TOKENS


class SessionTurns:
    """The last turns of all sessions, each by the client and the name of the session."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_sessions: int = MOST_SESSIONS) -> None:
        self._most_tokens = most_tokens
        self._most_sessions = most_sessions
        self._of_session: OrderedDict[tuple[str, str], list[SessionTurn]] = OrderedDict()
        self._num_tokens = 0

    def difference(self, session: tuple[str, str], prompt: TokenIds) -> TurnDifference | None:
        """Return where a prompt differs from the session's turns; None if it continues one, or there are none."""
        turns = self._of_session.get(session, [])
        turn = max(turns, key=lambda one: num_shared(one.tokens, prompt), default=None)
        if turn is None or (shared := num_shared(turn.tokens, prompt)) == min(len(turn.tokens), len(prompt)):
            return None
        return TurnDifference(
            request_id=turn.request_id,
            position=shared,
            num_left=len(turn.tokens) - shared,
            in_answer=shared >= turn.num_prompt,
            shared=prompt[max(0, shared - NUM_SHOWN) : shared].tobytes(),
            was=turn.tokens[shared : shared + NUM_SHOWN].tobytes(),
            now=prompt[shared : shared + NUM_SHOWN].tobytes(),
        )

    def keep(self, session: tuple[str, str], turn: SessionTurn) -> None:
        """Keep a turn in the place of those that it continues."""
        turns = self._of_session.setdefault(session, [])
        self._of_session.move_to_end(session)
        others = [one for one in turns if num_shared(one.tokens, turn.tokens) < len(one.tokens)]
        kept = [*others, turn][-MOST_TURNS:]
        self._num_tokens += sum(one.size for one in kept) - sum(one.size for one in turns)
        self._of_session[session] = kept
        while self._num_tokens > self._most_tokens or len(self._of_session) > self._most_sessions:
            _, gone = self._of_session.popitem(last=False)
            self._num_tokens -= sum(one.size for one in gone)


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length
