"""The format of gpt-oss: ``<|channel|>analysis<|message|>`` thoughts ``<|end|>``, and messages on other channels.

Owns: which messages are thoughts, which are the answer, and which are passed on unchanged, as they call functions.
Does not know: the format of calls.
"""

import re
from collections.abc import Sequence
from typing import Final

from engine.plugins.hookspecs import ParserContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.reasoning import ReasoningFormat, Thinking, num_begun

CALLBOARD_PLUGIN = {"api": 1}

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
_STOPS: Final = (END, CALL, START, CHANNEL)


class HarmonySplitter:
    """Splits one output into thoughts and answer.  inside: whether the next text is a thought."""

    def __init__(self, thinking: Thinking) -> None:
        self.inside = thinking == "open"
        self._call = False  # the message calls a function: it is passed on with its markers
        self._header: str | None = None  # the part so far of a message's header
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return (thoughts, answer) that are certain now."""
        text, self._held = self._held + text, ""
        parts = ("", "")
        while True:
            marks = _STOPS if self._header is None else (MESSAGE, END)
            at, mark = min(((at, one) for one in marks if (at := text.find(one)) >= 0), default=(-1, ""))
            if at < 0:
                num_certain = len(text) - max(num_begun(text, one) for one in marks)
                parts = self._joined(parts, text[:num_certain])
                self._held = text[num_certain:]
                return parts
            parts = self._joined(parts, text[:at])
            text = text[at + len(mark) :]
            parts = self._passed(parts, mark)

    def finish(self) -> tuple[str, str]:
        """Return (thoughts, answer) that were held back, at the end of the text."""
        parts = self._joined(("", ""), self._held)
        self._held, self._header = "", None  # a header without a message is dropped
        return parts

    def _joined(self, parts: tuple[str, str], text: str) -> tuple[str, str]:
        if self._header is not None:
            self._header += text
            return parts
        return (parts[0] + text, parts[1]) if self.inside else (parts[0], parts[1] + text)

    def _passed(self, parts: tuple[str, str], mark: str) -> tuple[str, str]:
        """Apply a marker, and return the parts with what it adds."""
        if mark == MESSAGE:
            header, self._header = self._header or "", None
            self._call = RECIPIENT.search(header) is not None
            self.inside = not self._call and "analysis" in header
            return (parts[0], parts[1] + header + mark) if self._call else parts
        if mark in (START, CHANNEL):
            self._header, self._call = mark, False
            return parts
        ends_call, self._call, self.inside, self._header = self._call, False, False, None
        return (parts[0], parts[1] + mark) if ends_call else parts


class HarmonyReasoning(ReasoningFormat):
    """Thoughts in messages on a channel."""

    markers: Sequence[str] = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)
    constrains = False

    def parser(self, thinking: Thinking) -> HarmonySplitter:
        return HarmonySplitter(thinking)

    def thinking_at_end(self, prompt: str, continued: str = "") -> Thinking:
        """Return 'open' if the prompt ends in a message on the channel of thoughts, else 'optional'."""
        last = prompt.rfind(MESSAGE)
        begun = prompt.rfind(CHANNEL)
        open_message = last > begun > prompt.rfind(END)
        return "open" if open_message and "analysis" in prompt[begun:last] else "optional"


@hookimpl
def callboard_reasoning_parser(context: ParserContext) -> HarmonyReasoning:
    """Build the format; takes no options."""
    decode_options("reasoning_parser.harmony", context.options, Options)
    return HarmonyReasoning()
