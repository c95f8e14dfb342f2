"""Builds the plugins that requests may use: grammars of structured output, logits processors.

Owns: the calls to these plugins.  Does not know: any library.  The grammar plugin is built for the first request that
needs it, since its tables for a large vocabulary take a second and tens of megabytes that most servers never use.
"""

from collections.abc import Callable

from engine.plugins.hookspecs import GrammarContext, LogitsProcessorContext
from engine.plugins.kinds import GRAMMAR, LOGITS_PROCESSOR
from engine.plugins.manager import Plugins
from engine.text.codec import TextCodec
from engine.text.grammar import GrammarEngine, Grammars
from engine.text.processors import LogitsProcessor, Processors
from engine.types.errors import RequestError


def plugin_grammars(
    plugins: Plugins,
    codec: Callable[[], TextCodec],
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Grammars:
    """Return the grammars.  codec: called at most once, for the first grammar."""
    name = plugins.names[GRAMMAR]

    def new_engine() -> GrammarEngine:
        if plugins.absent:
            raise RequestError(f"structured output: {plugins.absent}", code="unsupported_parameter")
        vocabulary = codec().vocabulary
        context = GrammarContext(
            vocab_size=vocab_size,
            pieces=vocabulary.all_pieces[:vocab_size],
            special_token_ids=[token_id for token_id in vocabulary.special_ids if token_id < vocab_size],
            eos_token_ids=eos_token_ids,
        )
        return plugins.build(name, context, GrammarEngine)

    return Grammars(new_engine, name=name)


def plugin_processors(plugins: Plugins, vocab_size: int) -> Processors:
    """Build the configured logits processors, in order.  Raises PluginError."""
    by_name = {}
    for name in plugins.several.get(LOGITS_PROCESSOR, ()):
        by_name[plugins.known[name].short] = plugins.build(name, LogitsProcessorContext(vocab_size), LogitsProcessor)
    return Processors(by_name)
