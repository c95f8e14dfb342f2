"""The protocols from a grammar to the tokens that may come next.

Owns: the protocols of a grammar plugin, and of the object that has the grammars of requests.
Does not know: any library, requests, devices, whether there is such an object (``engine/features/grammar``).
A mask has a bit per token of the model's vocabulary, packed into int32 words: token t is bit t % 32 of word t // 32.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine.types.errors import CallboardError
from engine.types.params import Grammar

Mask = npt.NDArray[np.int32]


class GrammarFailure(CallboardError):
    """Raised by a matcher that has met a limit of its library: its request ends, instead of unconstrained output."""


class Matcher(Protocol):
    """The position of one output in its grammar.  Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Advance by the next token, which the last mask allowed.  Raises GrammarFailure."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next, EOS included if the output may end.  mask: int32[words], overwritten.

        Raises GrammarFailure."""
        ...


@runtime_checkable
class CompiledGrammar(Protocol):
    """A grammar that has been checked.  num_bytes: its memory, approximately."""

    num_bytes: int

    def matcher(self) -> Matcher:
        """Return a matcher at the grammar's start."""
        ...


@runtime_checkable
class GrammarEngine(Protocol):
    """Compiles grammars for one model; any thread may call it.

    Whatever its input, it ends within seconds and bounded memory, and so do its matchers."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the checked grammar.  Raises RequestError (400) with its fault."""
        ...


class Grammars(Protocol):
    """The grammars of the requests of a process; any thread may call it.  name: of the plugin, for the log."""

    name: str

    def check(self, grammar: Grammar) -> float:
        """Compile the grammar; return the seconds that it took.  Raises RequestError if it is wrong or too large."""
        ...

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a new matcher at the grammar's start.  Raises RequestError as ``check`` does."""
        ...
