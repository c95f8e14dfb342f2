"""Granite 3: ``Here is my thought process:`` and ``Here is my response:``, in plain words.

Owns: these markers.  Does not know: which models write them.
"""

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.reasoning import MarkedReasoning

CALLBOARD_PLUGIN = {"api": 1}


@hookimpl
def callboard_reasoning_parser(context: ParserContext) -> MarkedReasoning:
    """Build the format; takes no options."""
    decode_options("reasoning_parser.granite", context.options, Options)
    return MarkedReasoning(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    )
