"""The format of gpt-oss: ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>``.

Owns: the messages of this format that are calls.  Does not know: the other messages, which the reasoning parser reads.
The recipient may also come before the channel: ``<|start|>assistant to=functions.f<|channel|>commentary``.
"""

from collections.abc import Sequence

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.reasoning_parser.harmony import CALL, CHANNEL, CONSTRAIN, MESSAGE, RECIPIENT, START
from engine.text.call_reader import CallReader, Reading
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import Tool

CALLBOARD_PLUGIN = {"api": 1}


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

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> HarmonyParser:
        """Return the parser.  The format has no grammar, so ``exact`` is never set."""
        return HarmonyParser()


@hookimpl
def callboard_tool_parser(context: ParserContext) -> HarmonyFormat:
    """Build the format; takes no options."""
    decode_options("tool_parser.harmony", context.options, Options)
    return HarmonyFormat()
