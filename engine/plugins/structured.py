"""Builds the objects that check and apply the forms of output that requests may ask for: grammars, logits processors.

Owns: the search for the feature that has grammars, the calls to logits processors.  Does not know: any library.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.plugins.features import feature_modules
from engine.plugins.hookspecs import LogitsProcessorContext
from engine.plugins.kinds import LOGITS_PROCESSOR
from engine.plugins.manager import Plugins
from engine.text.codec import TextCodec
from engine.text.forms import OutputForms
from engine.text.grammar import Grammars
from engine.text.processors import LogitsProcessor, Processors


class TextContext(NamedTuple):
    """A model's text in one process.  codec: called at most once, when it is needed."""

    plugins: Plugins
    codec: Callable[[], TextCodec]
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def plugin_grammars(
    plugins: Plugins, codec: Callable[[], TextCodec], *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Grammars | None:
    """Return the grammars of requests, which a feature's ``grammars.py`` builds; None without such a feature."""
    context = TextContext(plugins, codec, vocab_size, eos_token_ids)
    return next((module.request_grammars(context) for module in feature_modules("grammars").values()), None)


def plugin_processors(plugins: Plugins, vocab_size: int) -> Processors:
    """Build the configured logits processors, in order.  Raises PluginError."""
    by_name = {}
    for name in plugins.several.get(LOGITS_PROCESSOR, ()):
        by_name[plugins.known[name].short] = plugins.build(name, LogitsProcessorContext(vocab_size), LogitsProcessor)
    return Processors(by_name)


def plugin_forms(
    plugins: Plugins, codec: Callable[[], TextCodec], *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> OutputForms:
    """Return the forms of output that requests may demand.  Raises PluginError."""
    grammars = plugin_grammars(plugins, codec, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return OutputForms(grammars, plugin_processors(plugins, vocab_size))
