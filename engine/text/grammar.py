"""What a grammar plugin must do: from a grammar to the tokens that may come next.

Owns: the protocols.  Does not know: any library, requests, devices.
A mask has a bit per token of the model's vocabulary, packed into int32 words: token t is bit t % 32 of word t // 32.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine.errors import CallboardError
from engine.params import Grammar

Mask = npt.NDArray[np.int32]


class GrammarFailure(CallboardError):
    """A matcher cannot go on, for a limit of its library: its request ends, and nothing unconstrained is given out."""


class Matcher(Protocol):
    """Where one output stands in its grammar.  Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """The next token, one that the last mask allowed.  Raises GrammarFailure."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next, EOS among them where the output may end.  mask: int32[words], overwritten.

        Raises GrammarFailure."""
        ...


@runtime_checkable
class CompiledGrammar(Protocol):
    """A grammar that has been checked.  num_bytes: about how much memory it holds."""

    num_bytes: int

    def matcher(self) -> Matcher:
        """One at its start."""
        ...


@runtime_checkable
class GrammarEngine(Protocol):
    """Compiles grammars for one model; any thread may call it.

    It ends within seconds and bounded memory whatever it is given, and so do its matchers."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises RequestError (400) that says what is wrong with a grammar."""
        ...
