"""GLM-4.5 and later: ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``, optionally on lines.

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
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"


class GLMParser(CallReader):
    """Parses one output.  schemas: function name -> parameter name -> schema."""

    def __init__(self, schemas: dict[str, dict[str, object]]) -> None:
        self._schemas = schemas
        super().__init__()

    def read(self) -> Reading[None]:
        while (yield from self.text_until(OPEN)):
            self.begin(OPEN)
            yield from self.space()
            name = yield from self.word("\n", KEY, CLOSE)
            if name is None or not is_name(name.strip()):
                self.give_back()
                continue
            self.call(name.strip())
            if not (yield from self._arguments(self._schemas.get(name.strip(), {}))):
                self.cut_off = True

    def _arguments(self, schemas: dict[str, object]) -> Reading[bool]:
        """Emit the arguments.  Returns whether their end was reached."""
        self.argue("{")
        first = True
        while True:
            yield from self.space()
            if not (yield from self.accept(KEY)):
                break
            key = yield from self.value_until(KEY_END)
            if key is None or not (yield from self.skip(VALUE)):
                return False
            key = key.strip()
            if not (yield from self.argument(key, schemas.get(key), VALUE_END, first=first)):
                return False
            first = False
        if not (yield from self.skip(CLOSE)):
            return False
        self.argue("}")
        return True


class GLMFormat(ToolFormat):
    """Tags for each argument's key and value."""

    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> GLMParser:
        """Return the parser.  Every marker begins a call, so ``exact`` makes no difference."""
        return GLMParser({tool.name: properties(tool) for tool in tools})

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        calls = [
            CallShape(
                f"{OPEN}{tool.name}\n",
                tool.parameters,
                CLOSE,
                tool.name,
                written_values(tool, KEY, f"{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
            )
            for tool in tools
        ]
        return marked_calls(calls, OPEN, answer, many=many, forced=forced, separator="\n")


@hookimpl
def callboard_tool_parser(context: ParserContext) -> GLMFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.glm4", context.options, Options)
    return GLMFormat()
