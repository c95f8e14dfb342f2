"""The protocols of a grammar plugin, from a grammar to the tokens that may come next, and a cache of compiled grammars.

Owns: the protocols, the plugin's engine, the cache.  Does not know: any library, requests, devices.
A mask has a bit per token of the model's vocabulary, packed into int32 words: token t is bit t % 32 of word t // 32.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine.types.errors import CallboardError, RequestError
from engine.types.params import Grammar

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 64 << 20

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


class Grammars:
    """The grammars of open requests: each is compiled once, and kept while there is room.

    The tokenizer compiles a grammar in a worker thread, to refuse a wrong one; the executor then finds it in its cache.
    new_engine: builds the plugin's engine at the first request that needs it, which takes a second for a large
    vocabulary.  max_cache_bytes, num_cached_bytes: of compiled grammars.  name: of the plugin, for the log.
    """

    def __init__(
        self, new_engine: Callable[[], GrammarEngine], max_cache_bytes: int = MAX_CACHE_BYTES, name: str = "grammar"
    ) -> None:
        self.name = name
        self._new_engine = new_engine
        self._max_cache_bytes = max_cache_bytes
        self._engine: GrammarEngine | None = None
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self.num_cached_bytes = 0
        self._building = threading.Lock()
        self._caching = threading.Lock()

    def check(self, grammar: Grammar) -> float:
        """Compile the grammar; return the seconds that it took.  Raises RequestError if it is wrong or too large."""
        began = time.perf_counter()
        self._compiled(grammar)
        return time.perf_counter() - began

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a new matcher at the grammar's start.  Raises RequestError as ``check`` does."""
        return self._compiled(grammar).matcher()

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        with self._caching:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                return found
        with self._building:
            engine = self._engine = self._engine or self._new_engine()
        compiled = self._compile(engine, grammar)
        with self._caching:
            if grammar not in self._cache:
                self._cache[grammar] = compiled
                self.num_cached_bytes += compiled.num_bytes
            while self.num_cached_bytes > self._max_cache_bytes and len(self._cache) > 1:
                self.num_cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return compiled

    def _compile(self, engine: GrammarEngine, grammar: Grammar) -> CompiledGrammar:
        try:
            compiled = engine.compile(grammar)
            if not isinstance(compiled, CompiledGrammar):
                raise TypeError(f"compile returned {compiled!r}")
            return compiled
        except CallboardError:
            raise
        except (Exception, SystemExit) as error:
            log.exception("plugin %s raised an error for a grammar; its request ends", self.name)
            raise RequestError(
                "the grammar of this request could not be read; the server log has the details",
                status=500,
                code="internal_error",
            ) from error
