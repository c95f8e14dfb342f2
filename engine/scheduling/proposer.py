"""What a proposer plugin builds: it guesses how a sequence goes on, and the model verifies the guess.

Owns: the protocol.  Does not know: who is asked when, how guesses are verified.
A wrong guess costs time and never changes a token.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


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
    """num_tokens: the most that it is worth asking for.  Called on the scheduler's loop: every request waits for it."""

    num_tokens: int

    def open(self) -> ProposerSession:
        """A new sequence."""
        ...
