"""Proposers: a proposer guesses how a sequence goes on, and the model verifies the guess.

Owns: the protocol that a plugin implements, and the name of a smaller model that guesses instead.
Does not know: when it is called, how guesses are verified, what a model is.
A wrong guess costs time and never changes a token.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class ProposerSession(Protocol):
    """The guesses for one sequence: a pure function of its tokens, however these were divided into calls."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the sequence, its prompt at first.  At most 1,024 at a time."""
        ...

    def propose(self, most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may come next, or none.  Changes nothing."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """A source of guesses.  It runs on the scheduler's loop, so every request waits for it.

    num_tokens: the most tokens worth proposing, 1 to 64."""

    num_tokens: int

    def open(self) -> ProposerSession:
        """Return the session of a new sequence."""
        ...


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller model with the same tokenizer, which a plugin may return in place of a ``Proposer``.

    Every executor loads it next to the model, and decodes at most ``num_tokens`` with it in a step that verifies them.
    path: as ``model.path``.
    max_len: longest sequence that it guesses for; 0 for the length that it was trained for.
    reads_states: it is an EAGLE-3 head, which reads hidden states of the model.  Prefixes are then shared by pairs of
    tokens, since its result at a position depends on the next token too.
    is_part: it is such a head too, and a layer of the model's own checkpoint, whose path is not given."""

    path: str
    num_tokens: int
    max_len: int = 0
    reads_states: bool = False
    is_part: bool = False
