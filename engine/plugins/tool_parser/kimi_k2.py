"""Kimi K2: the id ``functions.f:0``, then the arguments as JSON, between markers.

Owns: this format.  Does not know: the models that use it.
"""

import re
from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import CallShape, Tool, marked_calls
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

CALLS_BEGIN: Final = "<|tool_calls_section_begin|>"
CALLS_END: Final = "<|tool_calls_section_end|>"
BEGIN: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
END: Final = "<|tool_call_end|>"
_ID: Final = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*")


class KimiParser(CallReader):
    """Parses one output."""

    def read(self) -> Reading[None]:
        while marker := (yield from self.text_until(CALLS_BEGIN, CALLS_END, BEGIN)):
            if marker != BEGIN:
                continue
            self.begin(BEGIN)
            identity = yield from self.word(ARGUMENTS)
            named = _ID.fullmatch(identity) if identity is not None else None
            if named is None:
                self.give_back()
                continue
            yield from self.accept(ARGUMENTS)
            self.call(named[1])
            yield from self.json_arguments()
            yield from self.close(END)


class KimiFormat(ToolFormat):
    """Ids and JSON between markers."""

    markers = (CALLS_BEGIN, CALLS_END, BEGIN, ARGUMENTS, END)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> KimiParser:
        """Return the parser.  Every marker begins a call, so ``exact`` makes no difference."""
        return KimiParser()

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar, in which every call has the index 0, as a call's grammar cannot count the others."""
        calls = [
            CallShape(f"{BEGIN}functions.{tool.name}:0{ARGUMENTS}", tool.parameters, END, tool.name) for tool in tools
        ]
        return marked_calls(calls, BEGIN, answer, many=many, forced=forced)


@hookimpl
def callboard_tool_parser(context: ParserContext) -> KimiFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.kimi_k2", context.options, Options)
    return KimiFormat()
