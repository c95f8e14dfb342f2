"""What a grammar plugin must do, from a grammar to the tokens that may come next, and the grammars it has compiled.

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
    """A matcher cannot go on, for a limit of its library: its request ends, and nothing unconstrained is given out."""


class Matcher(Protocol):
    """Where one output stands in its grammar.  Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Take the next token, one that the last mask allowed.  Raises GrammarFailure."""
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
        """A matcher at the grammar's start."""
        ...


@runtime_checkable
class GrammarEngine(Protocol):
    """Compiles grammars for one model; any thread may call it.

    It ends within seconds and bounded memory whatever it is given, and so do its matchers."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, checked.  Raises RequestError (400) that says what is wrong with it."""
        ...


class Grammars:
    """The grammars of open requests: each is compiled once, and kept while there is room.

    The tokenizer asks from its worker threads, to refuse what is wrong; the executor asks again from its own and finds
    it.  new_engine: builds the plugin's engine at the first request that needs it; that takes a second for a large
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
        """Compile the grammar; returns the seconds that it took.  Raises RequestError if it is wrong or too large."""
        began = time.perf_counter()
        self._compiled(grammar)
        return time.perf_counter() - began

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher at the grammar's start.  Raises RequestError as ``check`` does."""
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
            log.exception("plugin %s raised over a grammar; its request ends", self.name)
            raise RequestError(
                "the grammar of this request could not be read; the server log has the details",
                status=500,
                code="internal_error",
            ) from error
