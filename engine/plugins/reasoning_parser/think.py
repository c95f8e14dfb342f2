"""Qwen, DeepSeek, GLM, Kimi: thoughts end with ``</think>``, and begin with ``<think>`` or where the answer begins.

Owns: the choice of these markers.  Does not know: which models write them.
"""

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.reasoning import THINK, MarkedReasoning

CALLBOARD_PLUGIN = {"api": 1}


@hookimpl
def callboard_reasoning_parser(context: ParserContext) -> MarkedReasoning:
    """Build the format; takes no options."""
    decode_options("reasoning_parser.think", context.options, Options)
    return THINK
