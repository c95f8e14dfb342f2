"""Separation of a model's thoughts from its answer while both arrive in pieces.

Owns: the markers, and which text must wait because it may be the start of one.  Does not know: tokens, requests.
The result does not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, Protocol, runtime_checkable

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
_MAX_HELD_SPACE: Final = 8

Thinking = Literal["none", "open", "optional"]


class _Side(Enum):
    BEFORE = "before"  # only white space so far: thoughts may still begin
    INSIDE = "inside"
    BEHIND = "behind"  # the thoughts have ended; white space after them is not part of the answer
    ANSWER = "answer"


@runtime_checkable
class ReasoningParser(Protocol):
    """Separates the thoughts of one output from its answer.  The result does not depend on how the output is cut."""

    @property
    def inside(self) -> bool:
        """Whether the next text belongs to thoughts, as far as is known."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the (thoughts, answer) that are certain now."""

    def finish(self) -> tuple[str, str]:
        """Return the (thoughts, answer) that were held back, since no more text comes."""


@runtime_checkable
class ReasoningFormat(Protocol):
    """The way in which one model writes thoughts; a reasoning parser plugin builds it.

    markers: special tokens of the model around thoughts, which are shown to the parser.
    constrains: whether a grammar can apply after thoughts; if not, it applies from the start, without thoughts."""

    markers: Sequence[str]
    constrains: bool

    def parser(self, thinking: "Thinking") -> ReasoningParser:
        """Return a new parser of one output.  thinking: the prompt's ``thinking_at_end``."""

    def thinking_at_end(self, prompt: str, continued: str) -> "Thinking":
        """Return where a prompt leaves the model: in its thoughts, after them, or before either.

        continued: the assistant's message at the end of the prompt, if it continues; empty if an answer begins."""


class MarkedReasoning:
    """Thoughts at the beginning, between markers.  Any of ``opens`` begins them, any of ``closes`` ends them."""

    def __init__(self, opens: Sequence[str], closes: Sequence[str], *, constrains: bool = False) -> None:
        self.markers = (*opens, *closes)
        self.constrains = constrains
        self.opens = opens
        self.closes = closes

    def parser(self, thinking: "Thinking") -> "ReasoningSplitter":
        return ReasoningSplitter(thinking, self.opens, self.closes)

    def thinking_at_end(self, prompt: str, continued: str = "") -> "Thinking":
        opened, closed = _last(prompt, self.opens), _last(prompt, self.closes)
        if opened >= 0 and prompt[opened:].strip() == "":
            return "open"
        if closed >= 0 and prompt[closed:].strip() == "":
            return "none"
        # Elsewhere the markers may be text of a user.
        opened, closed = _last(continued, self.opens), _last(continued, self.closes)
        if opened < 0 and closed < 0:
            return "optional" if not continued.strip() else "none"
        return "open" if opened > closed else "none"


def _last(text: str, markers: Sequence[str]) -> int:
    """Return where the last marker in the text ends; -1 if there is none."""
    return max((at + len(one) for one in markers if (at := text.rfind(one)) >= 0), default=-1)


class ReasoningSplitter:
    """Separates thoughts from the answer.  thinking: the state in which the prompt leaves the model."""

    __slots__ = ("_closes", "_held", "_opens", "_place")

    def __init__(self, thinking: Thinking, opens: Sequence[str] = (OPEN,), closes: Sequence[str] = (CLOSE,)) -> None:
        self._opens = opens
        self._closes = closes
        self._place = {"none": _Side.ANSWER, "open": _Side.INSIDE, "optional": _Side.BEFORE}[thinking]
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the next text belongs to thoughts, as far as is known."""
        return self._place is _Side.INSIDE

    def push(self, text: str) -> tuple[str, str]:
        """Return the (thoughts, answer) that are certain now."""
        text, self._held = self._held + text, ""
        thoughts = ""
        if self._place is _Side.BEFORE:
            begun = text.lstrip()
            if marker := next((one for one in self._opens if begun.startswith(one)), ""):
                self._place = _Side.INSIDE
                text = begun[len(marker) :]
            elif any(one.startswith(begun) for one in self._opens):
                self._held = text
                return "", ""
            else:
                self._place = _Side.ANSWER
        if self._place is _Side.INSIDE:
            end, marker = min(((at, one) for one in self._closes if (at := text.find(one)) >= 0), default=(-1, ""))
            if end < 0:
                num_certain = len(text) - max(_num_held(text, one) for one in self._closes)
                self._held = text[num_certain:]
                return text[:num_certain], ""
            self._place = _Side.BEHIND
            # At most as much space is stripped as is held back, so that pieces give the same as the whole.
            before = text[:end]
            num_space = min(len(before) - len(before.rstrip()), _MAX_HELD_SPACE)
            thoughts, text = before[: len(before) - num_space], text[end + len(marker) :]
        if self._place is _Side.BEHIND:
            text = text.lstrip()
            if text:
                self._place = _Side.ANSWER
        return thoughts, text

    def finish(self) -> tuple[str, str]:
        """Return the (thoughts, answer) that were held back, since no more text comes."""
        held, self._held = self._held, ""
        return (held, "") if self.inside else ("", held)


def num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


def _num_held(text: str, marker: str) -> int:
    """Return how much of the end may be part of the closing marker or of white space before it."""
    num_marker = num_begun(text, marker)
    before = text[max(0, len(text) - num_marker - _MAX_HELD_SPACE) : len(text) - num_marker]
    return num_marker + len(before) - len(before.rstrip())


THINK: Final = MarkedReasoning((OPEN,), (CLOSE,), constrains=True)
