"""Llama 3: ``{"name": "f", "parameters": {...}}``, several joined by ``; ``, optionally after ``<|python_tag|>``.

Owns: this format.  Does not know: the models that use it.
Calls are the whole answer, as no marker distinguishes a call in text.
"""

import re
from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import SPACE, CallShape, Otherwise, Tool, json_name, shaped_calls
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

TAG: Final = "<|python_tag|>"
SEPARATOR: Final = "; "


class Llama3Parser(CallReader):
    """Parses one output.  starts: texts; every call begins with one of them."""

    def __init__(self, names: frozenset[str], starts: Sequence[str]) -> None:
        self._names = names
        self._starts = starts
        super().__init__()

    def read(self) -> Reading[None]:
        space = yield from self.space()
        while True:
            if (yield from self.accept(TAG)):
                space = yield from self.space()
                continue
            if not (yield from self.next_is(*self._starts)):
                break
            self.begin()
            if not (yield from self.named_object(strict=True, known=self._names)):
                if self.told:
                    self.cut_off = True
                    yield from self.drop_rest()
                    return
                self.give_back()
                break
            yield from self.space(besides=";,")
        if not self.num_calls:
            self.say(space)
        else:
            self.drop_begun(TAG, *self._starts)
        yield from self.rest()


class Llama3Format(ToolFormat):
    """JSON with a name and parameters."""

    markers = (TAG,)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> Llama3Parser:
        """Return the parser: with a grammar only its own form is a call, otherwise many deviations are accepted."""
        return Llama3Parser(
            frozenset(tool.name for tool in tools), [_start(tool.name) for tool in tools] if exact else ["{"]
        )

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar, in which an answer cannot begin like a call."""
        calls = [CallShape(f'{_start(tool.name)}, "parameters": ', tool.parameters, "}", tool.name) for tool in tools]
        if forced:
            return shaped_calls(calls, SEPARATOR, many=many)
        kind, source = ("text", "") if answer is None else (answer.kind, answer.source)
        begun = "|".join(re.escape(one) for one in (TAG, *(_start(tool.name) for tool in tools)))
        otherwise = Otherwise(kind, source, not_begun=f"{SPACE}({begun})")
        return shaped_calls(calls, SEPARATOR, many=many, tag=TAG, otherwise=otherwise)


def _start(name: str) -> str:
    """Return the beginning of a call in a grammar.  An output with this beginning must continue as a call."""
    return f'{{"name": {json_name(name)}'


@hookimpl
def callboard_tool_parser(context: ParserContext) -> Llama3Format:
    """Build the format; takes no options."""
    decode_options("tool_parser.llama3_json", context.options, Options)
    return Llama3Format()
