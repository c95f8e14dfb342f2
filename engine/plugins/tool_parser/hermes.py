"""Hermes and Qwen: ``<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>``, once per call.

Owns: this format.  Does not know: the models that use it.
"""

from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import SPACE, CallShape, Tool, json_name, marked_calls
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesParser(CallReader):
    """Parses one output."""

    def read(self) -> Reading[None]:
        while (yield from self.text_until(OPEN)):
            self.begin(OPEN)
            if (yield from self.named_object(strict=False)):
                yield from self.close(CLOSE)
            elif not self.told:
                self.give_back()
            elif not (yield from self.skip(CLOSE)):
                self.cut_off = True


class HermesFormat(ToolFormat):
    """Calls as JSON inside ``<tool_call>``."""

    markers = (OPEN, CLOSE)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> HermesParser:
        """Return the parser.  Text that a grammar allows next to calls cannot be one, so ``exact`` is unused."""
        return HermesParser()

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar.  Strings of a JSON answer may contain the marker, as their quotes are escaped."""
        calls = [
            CallShape(
                f'{OPEN}\n{{"name": {json_name(tool.name)}, "arguments": ', tool.parameters, f"}}\n{CLOSE}", tool.name
            )
            for tool in tools
        ]
        called = rf'{OPEN}{SPACE}\{{[\s,]*"'
        return marked_calls(calls, OPEN, answer, many=many, forced=forced, separator="\n", called=called)


@hookimpl
def callboard_tool_parser(context: ParserContext) -> HermesFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.hermes", context.options, Options)
    return HermesFormat()
