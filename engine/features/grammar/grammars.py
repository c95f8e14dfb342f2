"""The grammars of requests: the plugin's engine, built when the first one comes, and a cache of compiled grammars.

Owns: that engine, the cache.  Does not know: any library, requests, devices.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from engine.plugins.hookspecs import GrammarContext
from engine.plugins.kinds import GRAMMAR
from engine.plugins.structured import TextContext
from engine.text.grammar import CompiledGrammar, GrammarEngine, Matcher
from engine.types.errors import CallboardError, RequestError
from engine.types.params import Grammar

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 64 << 20


class GrammarCache:
    """The grammars of open requests, as ``Grammars``: each is compiled once, and kept while there is room.

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
        began = time.perf_counter()
        self._compiled(grammar)
        return time.perf_counter() - began

    def matcher(self, grammar: Grammar) -> Matcher:
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


def request_grammars(context: TextContext) -> GrammarCache:
    """Return the grammars of a process.

    The engine is built for the first request that needs it, since its tables for a large vocabulary take a second and
    tens of megabytes that most servers never use."""
    plugins, vocab_size = context.plugins, context.vocab_size
    name = plugins.names[GRAMMAR]

    def new_engine() -> GrammarEngine:
        if plugins.absent:
            raise RequestError(f"structured output: {plugins.absent}", code="unsupported_parameter")
        vocabulary = context.codec().vocabulary
        arguments = GrammarContext(
            vocab_size=vocab_size,
            pieces=vocabulary.all_pieces[:vocab_size],
            special_token_ids=[token_id for token_id in vocabulary.special_ids if token_id < vocab_size],
            eos_token_ids=context.eos_token_ids,
        )
        return plugins.build(name, arguments, GrammarEngine)

    return GrammarCache(new_engine, name=name)
