"""The grammars of open requests: compiled once, kept while there is room.

Owns: the plugin's engine, built when the first request needs it, and the cache.  Does not know: any library.
The tokenizer asks from its worker threads, to refuse what is wrong; the executor asks again from its own and finds it.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import CallboardError, RequestError
from engine.params import Grammar
from engine.text.grammar import CompiledGrammar, GrammarEngine, Matcher

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 64 << 20


class Grammars:
    """new_engine: builds the plugin's engine, which takes a second for a large vocabulary.
    max_cache_bytes: of compiled grammars.  name: of the plugin, for the log."""

    def __init__(
        self, new_engine: Callable[[], GrammarEngine], max_cache_bytes: int = MAX_CACHE_BYTES, name: str = "grammar"
    ) -> None:
        self.name = name
        self._new_engine = new_engine
        self._max_cache_bytes = max_cache_bytes
        self._engine: GrammarEngine | None = None
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._building = threading.Lock()
        self._caching = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raises RequestError if it is wrong or too large."""
        self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new one.  Raises RequestError as ``check`` does."""
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
                self._num_bytes += compiled.num_bytes
            while self._num_bytes > self._max_cache_bytes and len(self._cache) > 1:
                self._num_bytes -= self._cache.popitem(last=False)[1].num_bytes
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
