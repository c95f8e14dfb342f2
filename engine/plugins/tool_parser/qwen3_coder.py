"""Qwen3-Coder: ``<tool_call><function=f><parameter=x>`` value ``</parameter></function></tool_call>``, on lines.

Owns: this format.  Does not know: the models that use it.
Values are text; the schema of a parameter determines whether it is a string.
"""

from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading, is_name
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import CallShape, Tool, marked_calls, properties, written_values
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"


class Qwen3CoderParser(CallReader):
    """Parses one output.  schemas: function name -> parameter name -> schema."""

    def __init__(self, schemas: dict[str, dict[str, object]]) -> None:
        self._schemas = schemas
        super().__init__()

    def read(self) -> Reading[None]:
        while marker := (yield from self.text_until(OPEN, FUNCTION)):  # some models omit the first
            self.begin(marker)
            if marker == OPEN:
                yield from self.space()
            if marker == OPEN and not (yield from self.accept(FUNCTION)):
                self.give_back()
                continue
            name = yield from self.word(">")
            if name is None or not is_name(name):
                self.give_back()
                continue
            yield from self.accept(">")
            self.call(name)
            if not (yield from self._arguments(self._schemas.get(name, {}))):
                self.cut_off = True
            yield from self.close(CLOSE)

    def _arguments(self, schemas: dict[str, object]) -> Reading[bool]:
        """Emit the arguments.  Returns whether their end was reached."""
        self.argue("{")
        first = True
        while True:
            yield from self.space()
            if not (yield from self.accept(PARAMETER)):
                break
            key = yield from self.value_until(">")
            if key is None:
                return False
            yield from self.accept("\n")
            if not (yield from self.argument(key, schemas.get(key), PARAMETER_END, first=first, trim="\n")):
                return False
            first = False
        if not (yield from self.skip(FUNCTION_END)):
            return False
        self.argue("}")
        return True


class Qwen3CoderFormat(ToolFormat):
    """Tags for the function and each parameter."""

    markers = (OPEN, CLOSE)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> Qwen3CoderParser:
        """Return the parser.  Every ``FUNCTION`` begins a call in the grammar too, so ``exact`` makes no difference."""
        return Qwen3CoderParser({tool.name: properties(tool) for tool in tools})

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        calls = [
            CallShape(
                f"{OPEN}\n{FUNCTION}{tool.name}>\n",
                tool.parameters,
                f"{FUNCTION_END}\n{CLOSE}",
                tool.name,
                written_values(tool, PARAMETER, ">\n", f"\n{PARAMETER_END}\n"),
            )
            for tool in tools
        ]
        return marked_calls(calls, FUNCTION, answer, many=many, forced=forced, separator="\n")


@hookimpl
def callboard_tool_parser(context: ParserContext) -> Qwen3CoderFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.qwen3_coder", context.options, Options)
    return Qwen3CoderFormat()
