"""The format of gpt-oss: ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>``.

Owns: the messages of this format that are calls.  Does not know: the other messages, which the reasoning parser reads.
The recipient may also come before the channel: ``<|start|>assistant to=functions.f<|channel|>commentary``.
"""

from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.reasoning_parser.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, START
from engine.text.call_reader import CallReader, Reading
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import CallShape, Otherwise, Tool, marked_calls, shaped_calls
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1}

OPEN: Final = "to=functions."
BEGIN: Final = f"{CHANNEL}commentary {OPEN}"
NEXT: Final = f"{START}assistant"
# What may stand between a function's name and its arguments.
REST: Final = (f" {CONSTRAIN}json", f"{CHANNEL}commentary {CONSTRAIN}json", f"{CHANNEL}commentary json", " json", "")


class HarmonyParser(CallReader):
    """Parses one output."""

    def read(self) -> Reading[None]:
        while marker := (yield from self.text_until(START, CHANNEL)):
            self.begin(marker)
            header = yield from self.word(MESSAGE)
            named = RECIPIENT.search(header) if header is not None else None
            if named is None:
                self.give_back()
                continue
            yield from self.accept(MESSAGE)
            self.call(named[1])
            yield from self.json_arguments()
            yield from self.close(CALL)


class HarmonyFormat(ToolFormat):
    """Messages to functions on a channel."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, CALL)
    constrains = True

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> HarmonyParser:
        """Return the parser.  Every header with a recipient begins a call, so ``exact`` makes no difference."""
        return HarmonyParser()

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar: among messages whatever header names a function, else calls on their usual channel."""
        if forced or answer is not None:
            calls = [
                CallShape(f"{BEGIN}{tool.name}{REST[0]}{MESSAGE}", tool.parameters, CALL, tool.name) for tool in tools
            ]
            return marked_calls(calls, CHANNEL, answer, many=many, forced=forced, separator=NEXT)
        rests = [f"{rest}{MESSAGE}" for rest in REST]
        calls = [CallShape(f"{OPEN}{tool.name}", tool.parameters, CALL, tool.name, then=rests) for tool in tools]
        others = [START, CHANNEL, CONSTRAIN, END]
        return shaped_calls(
            calls, "", many=many, otherwise=Otherwise("text", opening=OPEN, markers=others, quoting=[MESSAGE])
        )


@hookimpl
def callboard_tool_parser(context: ParserContext) -> HarmonyFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.harmony", context.options, Options)
    return HarmonyFormat()
