"""From a configuration to what requests may ask of plugins: grammars of structured output, logits processors.

Owns: asking these plugins.  Does not know: any library.  The grammar plugin is asked when the first request needs it,
since its tables for a large vocabulary take a second and tens of megabytes that most servers never use.
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
    """Return the grammars.  codec: called at most once, when the first grammar comes."""
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
    """Build those that the configuration names, in its order.  Raises PluginError."""
    by_name = {}
    for name in plugins.several.get(LOGITS_PROCESSOR, ()):
        by_name[plugins.known[name].short] = plugins.build(name, LogitsProcessorContext(vocab_size), LogitsProcessor)
    return Processors(by_name)
