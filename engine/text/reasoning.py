"""What a model thinks before it answers, told apart from the answer while both arrive in pieces.

Owns: the markers, and which text must wait because it may be the start of one.  Does not know: tokens, requests.
The result does not depend on how the text is cut into pieces.
"""

from enum import Enum
from typing import Final, Literal

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
_MAX_HELD_SPACE: Final = 8

Thinking = Literal["none", "open", "optional"]


class _Place(Enum):
    BEFORE = "before"  # nothing but white space so far: it may still begin to think
    INSIDE = "inside"
    BEHIND = "behind"  # the thoughts are over; the white space behind them is no part of the answer
    ANSWER = "answer"


class ReasoningSplitter:
    """Tells thoughts from the answer.  thinking: as ``thinking_at_end`` says of the prompt."""

    __slots__ = ("_held", "_place")

    def __init__(self, thinking: Thinking) -> None:
        self._place = {"none": _Place.ANSWER, "open": _Place.INSIDE, "optional": _Place.BEFORE}[thinking]
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the next text is thought, as far as is known."""
        return self._place is _Place.INSIDE

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that are certain now."""
        text, self._held = self._held + text, ""
        thoughts = ""
        if self._place is _Place.BEFORE:
            begun = text.lstrip()
            if begun.startswith(OPEN):
                self._place = _Place.INSIDE
                text = begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                self._held = text
                return "", ""
            else:
                self._place = _Place.ANSWER
        if self._place is _Place.INSIDE:
            end = text.find(CLOSE)
            if end < 0:
                num_certain = len(text) - _num_held(text)
                self._held = text[num_certain:]
                return text[:num_certain], ""
            self._place = _Place.BEHIND
            # No more space is stripped than is held back, so that pieces cannot differ from the whole.
            before = text[:end]
            num_space = min(len(before) - len(before.rstrip()), _MAX_HELD_SPACE)
            thoughts, text = before[: len(before) - num_space], text[end + len(CLOSE) :]
        if self._place is _Place.BEHIND:
            text = text.lstrip()
            if text:
                self._place = _Place.ANSWER
        return thoughts, text

    def finish(self) -> tuple[str, str]:
        """(thoughts, answer) that were held back, since no more text comes."""
        held, self._held = self._held, ""
        return (held, "") if self.inside else ("", held)


def num_begun(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))


def _num_held(text: str) -> int:
    """How much of the end may be part of the closing marker or of the white space before it."""
    num_marker = num_begun(text, CLOSE)
    before = text[max(0, len(text) - num_marker - _MAX_HELD_SPACE) : len(text) - num_marker]
    return num_marker + len(before) - len(before.rstrip())


def thinking_at_end(prompt: str) -> Thinking:
    """Where a prompt leaves the model: in the middle of its thoughts, with them behind it, or before either."""
    opened, closed = prompt.rfind(OPEN), prompt.rfind(CLOSE)
    if opened >= 0 and prompt[opened + len(OPEN) :].strip() == "":
        return "open"
    if closed >= 0 and prompt[closed + len(CLOSE) :].strip() == "":
        return "none"
    return "optional"
