"""DeepSeek V3 and R1: ``function<sep>f\\n```json\\n{...}\\n``` `` between markers; V3.1 and later: ``f<sep>{...}``.

Owns: these formats.  Does not know: the models that use them.
"""

from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading, is_name
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import CallShape, Tool, marked_calls
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
BEGIN: Final = "<｜tool▁call▁begin｜>"
END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
TYPE: Final = "function"  # type of a call in older models
FENCE: Final = "```"


class DeepSeekParser(CallReader):
    """Parses one output."""

    def read(self) -> Reading[None]:
        while marker := (yield from self.text_until(CALLS_BEGIN, CALLS_END, BEGIN)):
            if marker == BEGIN:
                self.begin(BEGIN)
                yield from self._call()

    def _call(self) -> Reading[None]:
        name = yield from self.word(SEPARATOR)
        yield from self.accept(SEPARATOR)
        if name == TYPE and not (yield from self._arguments_follow()):
            name = yield from self.word("\n")
        if name is None or not is_name(name.strip()):
            self.give_back()
            return
        self.call(name.strip())
        yield from self.close(f"{FENCE}json")
        yield from self.json_arguments()
        yield from self.close(FENCE, END)

    def _arguments_follow(self) -> Reading[bool]:
        yield from self.space()
        return bool((yield from self.next_is("{")))


class DeepSeekFormat(ToolFormat):
    """Calls between markers, as JSON.  older: with a type, and a fence around the JSON."""

    markers = (CALLS_BEGIN, CALLS_END, BEGIN, END, SEPARATOR)
    constrains = True

    def __init__(self, *, older: bool) -> None:
        self._older = older

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> DeepSeekParser:
        """Return the parser, which reads both forms of a call, with a grammar or without."""
        return DeepSeekParser()

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        calls = [self._shape(tool) for tool in tools]
        return marked_calls(calls, BEGIN, answer, many=many, forced=forced, separator="\n")

    def _shape(self, tool: Tool) -> CallShape:
        if self._older:
            begin = f"{BEGIN}{TYPE}{SEPARATOR}{tool.name}\n{FENCE}json\n"
            return CallShape(begin, tool.parameters, f"\n{FENCE}{END}", tool.name)
        return CallShape(f"{BEGIN}{tool.name}{SEPARATOR}", tool.parameters, END, tool.name)


@hookimpl
def callboard_tool_parser(context: ParserContext) -> DeepSeekFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.deepseek_v3", context.options, Options)
    return DeepSeekFormat(older=not context.template or f"{FENCE}json" in context.template)
