"""Llama 3.2 and 4: ``[f(x=1, y="a"), g()]``, optionally between ``<|python_start|>`` and ``<|python_end|>``.

Owns: this format.  Does not know: the models that use it.
Calls are the whole answer.  Every argument is emitted as JSON when it is complete.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.call_reader import CallReader, Reading, as_json
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import SPACE, CallShape, Otherwise, Tool, shaped_calls, written_values
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

TAG: Final = "<|python_tag|>"
START: Final = "<|python_start|>"
END: Final = "<|python_end|>"


class PythonicParser(CallReader):
    """Parses one output."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        super().__init__()

    def read(self) -> Reading[None]:
        space = yield from self.space()
        if (yield from self.accept(TAG, START)):
            space = yield from self.space()
        self.begin()
        if (yield from self.accept("[")):
            yield from self._calls()
        if not self.told:
            self.give_back()
        if self.num_calls:
            yield from self.close("]", END)
            space = yield from self.space()
        if not self.num_calls:
            self.say(space)
        yield from self.rest()

    def _calls(self) -> Reading[None]:
        while True:
            yield from self.space()
            name = yield from self.word("(", "[", "]", "\n", '"')
            if name is None or name.strip() not in self._names or not (yield from self.accept("(")):
                return
            self.call(name.strip())
            if not (yield from self._arguments()):
                self.cut_off = True
                yield from self.drop_rest()
                return
            yield from self.space()
            if not (yield from self.accept(",")):
                return
            self.begin()

    def _arguments(self) -> Reading[bool]:
        """Emit the arguments.  Returns whether their end was reached and all could be parsed."""
        self.argue("{")
        first = True
        while True:
            yield from self.space()
            if (yield from self.accept(")")):
                self.argue("}")
                return True
            written = yield from self._argument()
            if written is None:
                return False
            self.argue(("" if first else ", ") + written)
            first = False
            yield from self.space()
            yield from self.accept(",")

    def _argument(self) -> Reading[str | None]:
        """Return the next ``key=value`` as JSON; None if it is invalid or does not end."""
        written = yield from self.scan(_ArgumentEnd().find)
        key, assigned, value = (written or "").partition("=")
        if not assigned or not key.strip().isidentifier():
            return None
        return _as_json_pair(key.strip(), value.strip())


class _ArgumentEnd:
    """Finds the comma or bracket after an argument that arrives in pieces, skipping strings and nested brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the end of the argument, exclusive; None if it continues."""
        for at, character in enumerate(text):
            if self._quote:
                if not self._escaped and character == self._quote:
                    self._quote = ""
                self._escaped = not self._escaped and character == "\\"
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif self._depth == 0 and character in ",)":
                return at
            elif character in ")]}":
                self._depth -= 1
        return None


def _as_json_pair(key: str, value: str) -> str | None:
    for decode in (json.loads, ast.literal_eval):  # some models write ``true`` and ``null``
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler warns about a model's backslashes
                return f"{as_json(key)}: {as_json(decode(value))}"
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


class PythonicFormat(ToolFormat):
    """A list of calls as Python writes them."""

    markers = (TAG, START, END)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> PythonicParser:
        """Return the parser.  Text that a grammar allows does not begin like a call, so ``exact`` is unused."""
        return PythonicParser(frozenset(tool.name for tool in tools))

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar, in which values are JSON, and an answer cannot begin like a call."""
        calls = [
            CallShape(f"{tool.name}(", tool.parameters, ")", tool.name, written_values(tool, "", "=", ""), ", ")
            for tool in tools
        ]
        kind, source = ("text", "") if answer is None else (answer.kind, answer.source)
        names = "|".join(re.escape(tool.name) for tool in tools)
        tags = "|".join(map(re.escape, (TAG, START)))
        begun = rf"{SPACE}({tags})?{SPACE}\[{SPACE}({names}){SPACE}\("
        otherwise = None if forced else Otherwise(kind, source, not_begun=begun)
        return shaped_calls(calls, ", ", many=many, tag=START, otherwise=otherwise, around=("[", "]"))


@hookimpl
def callboard_tool_parser(context: ParserContext) -> PythonicFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.pythonic", context.options, Options)
    return PythonicFormat()
