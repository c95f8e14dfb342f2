"""What a proposer plugin builds: it guesses how a sequence goes on, and the model verifies the guess.

Owns: the protocol, and the name of a smaller model that guesses instead.
Does not know: who is asked when, how guesses are verified, what a model is.
A wrong guess costs time and never changes a token.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class ProposerSession(Protocol):
    """One sequence's guesses: a pure function of its tokens, however these were cut into calls."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these; at first they are its prompt.  Never more than 1,024 at a time."""
        ...

    def propose(self, most: int) -> Sequence[int]:
        """At most so many tokens that may come next; none if nothing suggests any.  Changes nothing."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """num_tokens: the most worth asking for, 1 to 64.  Called on the scheduler's loop: every request waits for it."""

    num_tokens: int

    def open(self) -> ProposerSession:
        """A new sequence."""
        ...


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin may build instead: the checkpoint of a smaller model with the same tokenizer.

    Every executor loads it beside the model, and decodes ``num_tokens`` at most with it in a step that verifies them.
    path: as ``model.path``.  max_len: of sequences that it guesses for; 0 for what it was trained for.
    reads_states: it is an EAGLE-3 head, which reads hidden states of the model; prefixes are then shared by pairs of
    tokens, since what it computes at a position depends on the next token too."""

    path: str
    num_tokens: int
    max_len: int = 0
    reads_states: bool = False
