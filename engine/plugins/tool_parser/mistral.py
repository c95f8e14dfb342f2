"""Mistral: ``[TOOL_CALLS]f[ARGS]{...}``, in older models ``[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]``.

Owns: these formats.  Does not know: the models that use them.
The newer one may omit ``[ARGS]``, and name the call's id between ``[CALL_ID]`` and ``[ARGS]``.
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

OPEN: Final = "[TOOL_CALLS]"
ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"


class MistralParser(CallReader):
    """Parses one output."""

    def read(self) -> Reading[None]:
        while (yield from self.text_until(OPEN)):
            self.begin(OPEN)
            yield from self.space()
            if (yield from self.accept("[")):
                yield from self._list()
            elif (yield from self.next_is("{")):
                yield from self._object()
            else:
                yield from self._named()

    def _list(self) -> Reading[None]:
        while (yield from self._object()) and (yield from self.space()) is not None:
            if not (yield from self.accept(",")):
                yield from self.close("]")
                return
            self.begin()

    def _object(self) -> Reading[bool]:
        whole = yield from self.named_object(strict=False)
        if not whole:
            if self.told:
                self.cut_off = True
                yield from self.drop_rest()
            else:
                self.give_back()
        return whole

    def _named(self) -> Reading[None]:
        name = yield from self.word("{", ARGUMENTS, ID)
        if name is None or not is_name(name.strip()):
            self.give_back()
            return
        if (yield from self.accept(ID)) and (yield from self.word("{", ARGUMENTS)) is None:
            self.give_back()
            return
        yield from self.accept(ARGUMENTS)
        self.call(name.strip())
        yield from self.json_arguments()


class MistralFormat(ToolFormat):
    """Calls as JSON after ``[TOOL_CALLS]``."""

    markers = (OPEN, ID, ARGUMENTS)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> MistralParser:
        """Return the parser.  Every marker begins a call, so ``exact`` makes no difference."""
        return MistralParser()

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        calls = [CallShape(f"{OPEN}{tool.name}{ARGUMENTS}", tool.parameters, "", tool.name) for tool in tools]
        return marked_calls(calls, OPEN, answer, many=many, forced=forced)


@hookimpl
def callboard_tool_parser(context: ParserContext) -> MistralFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.mistral", context.options, Options)
    return MistralFormat()
