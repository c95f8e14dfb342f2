"""Separation of function calls from a model's text while both arrive in pieces.

Owns: the interface of a tool parser, and the rules for every format: which calls count, whether the last one is whole.
Does not know: HTTP, tokens, how any format is written, what the functions do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.text.tool_format import Tool
from engine.types.params import Grammar


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call.  index: number of the call.  name: only in a call's first piece.  arguments: to be joined."""

    index: int
    name: str | None
    arguments: str


OutputPart = str | CallPiece  # text, or a part of a call


@runtime_checkable
class ToolParser(Protocol):
    """Separates the calls of one output from its text.

    Any way of cutting the output into pieces gives the same text, calls and ``cut_off``.  Calls are numbered from 0 in
    order.  Text is never lost: a beginning that turns out to be no call before it has a name is text.
    cut_off: whether the output has ended within a named call, whose arguments are not whole."""

    cut_off: bool

    def push(self, text: str) -> list[OutputPart]:
        """Return the parts that are certain now, in order.  text: continues the text of earlier calls."""

    def finish(self) -> list[OutputPart]:
        """Return the parts that were held back, since no more text comes."""


@runtime_checkable
class ToolFormat(Protocol):
    """The way in which one model writes function calls; a tool parser plugin builds it.

    markers: special tokens of the model in its calls, which are shown to the parser.
    constrains: whether ``grammar`` makes grammars; if not, the hermes format is required where a call is.
    A format that makes none may be a subclass, and leave out both."""

    markers: Sequence[str]
    constrains: bool = False

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> ToolParser:
        """Return a new parser of one output.  tools: functions to call; their parameters may be empty.

        exact: whether a grammar of this format applies, so that text that only resembles a call is no call."""

    def grammar(self, tools: Sequence[Tool], answer: Grammar | None, *, many: bool, forced: bool) -> Grammar:
        """Return the grammar of an output that calls one of ``tools``, or several if ``many``.

        forced: there must be a call.  answer: grammar of an output without a call, if it is not forced; None for any.
        """
        assert not self.constrains, f"{type(self).__name__} declares that it constrains"
        raise NotImplementedError


def text_and_calls(parts: Iterable[OutputPart]) -> tuple[str, list[CallPiece]]:
    """Return the text and the calls apart, without their order relative to each other."""
    parts = list(parts)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, CallPiece)]


class ToolCallParser:
    """The parser of one output, as answers need it.

    max_calls: later calls are dropped.  forced: a call must come, so text held back at the end is the beginning of one.
    num_calls: so far.  cut_off: whether the output has ended within a call that was shown."""

    def __init__(self, parser: ToolParser, max_calls: int | None = None, *, forced: bool = False) -> None:
        self.num_calls = 0
        self.cut_off = False
        self._parser = parser
        self._max_calls = max_calls
        self._forced = forced

    def push(self, text: str) -> list[OutputPart]:
        return self._counted(self._parser.push(text))

    def finish(self) -> list[OutputPart]:
        parts = self._counted(self._parser.finish())
        self.cut_off = self._parser.cut_off and self._shows(self.num_calls - 1)
        return [part for part in parts if not (self._forced and isinstance(part, str))]

    def _counted(self, parts: list[OutputPart]) -> list[OutputPart]:
        self.num_calls += sum(isinstance(part, CallPiece) and part.name is not None for part in parts)
        return [part for part in parts if isinstance(part, str) or self._shows(part.index)]

    def _shows(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls
