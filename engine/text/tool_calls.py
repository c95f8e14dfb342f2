"""Function calls in a model's output, told apart from its text while both arrive in pieces.

Owns: which text must wait because it may become a call, and giving it back if it does not.
Does not know: HTTP, tokens, what the functions do.
The result does not depend on how the text is cut into pieces, and text is never lost: what looks like a call and is
none comes out as text.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.text.call_scanner import CallScanner
from engine.text.reasoning import num_begun
from engine.text.tool_format import CALL_CLOSE, CALL_OPEN, PYTHON_TAG, ToolFormat, call_start


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call.  index: which call.  name: in a call's first piece only.  arguments: to be joined."""

    index: int
    name: str | None
    arguments: str


Part = str | CallPiece  # text, or a part of a call


def text_and_calls(parts: Iterable[Part]) -> tuple[str, list[CallPiece]]:
    """The text and the calls apart, where their order among each other does not matter."""
    parts = list(parts)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, CallPiece)]


class ToolCallParser:
    """Tells calls from text.  names: of the functions there are.  max_calls: later ones are dropped.
    exact: a grammar holds, so what only resembles a call is none; without one much that models write is forgiven.
    forced: a call must come, so what is held back at the end is the beginning of one, not text.
    num_calls: so far.  cut_off: the output has ended within a call, whose arguments are not whole."""

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        exact: bool = False,
        forced: bool = False,
    ) -> None:
        self.num_calls = 0
        self.cut_off = False
        self._hermes = form == "hermes"
        self._names = names
        self._starts = [call_start(name) for name in names] if exact else ["{"]  # in the llama3 format
        self._max_calls = max_calls
        self._forced = forced
        self._pending = ""
        self._scanner: CallScanner | None = None
        self._raw: list[str] = []  # of a call whose name is not known yet: it may turn out to be text
        self._announced = False
        self._skipping = False  # a call that broke after its name was told: up to its end nothing is shown
        self._at_start = True
        self._behind_call = False
        self._text_only = False
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now, in order."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """The parts that were held back, since no more text comes."""
        self.cut_off = self._shown and (self._skipping or (self._scanner is not None and self._announced))
        if not self._forced:
            if not self._announced:
                self._parts += self._raw
            if not self._skipping and self._scanner is None and not (self._at_start and self.num_calls):
                self._parts.append(self._pending)
        self._pending, self._raw = "", []
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [part for part in parts if part != ""]

    def _advance(self) -> bool:
        """Handle some of what is pending; False if it takes more text to go on."""
        if self._skipping:
            return self._skip()
        if self._scanner is not None:
            return self._scan()
        if self._text_only:
            self._parts.append(self._pending)
            self._pending = ""
            return False
        return self._find_hermes() if self._hermes else self._find_llama()

    # ---- between calls ----------------------------------------------------------------------

    def _find_hermes(self) -> bool:
        if self._at_start:
            # White space in front of a call, and the end of the call before it, belong to no text.
            rest = self._pending.lstrip()
            if self._behind_call and rest.startswith(CALL_CLOSE):
                self._pending, self._behind_call = rest[len(CALL_CLOSE) :], False
                return True
            if rest.startswith(CALL_OPEN):
                return self._begin(CALL_OPEN, rest[len(CALL_OPEN) :])
            if CALL_OPEN.startswith(rest) or (self._behind_call and CALL_CLOSE.startswith(rest)):
                return False
            self._at_start = self._behind_call = False
            if self.num_calls:
                self._pending = rest
        before, marker, rest = self._pending.partition(CALL_OPEN)
        if marker:
            self._parts.append(before)
            return self._begin(CALL_OPEN, rest)
        num_certain = len(self._pending) - num_begun(self._pending, CALL_OPEN)
        self._parts.append(self._pending[:num_certain])
        self._pending = self._pending[num_certain:]
        return False

    def _find_llama(self) -> bool:
        """Look for a call where the answer begins or a call has ended: calls are the whole answer."""
        rest = self._pending.lstrip(" \t\r\n;," if self.num_calls else None)
        if rest.startswith(PYTHON_TAG):
            self._pending = rest[len(PYTHON_TAG) :]
            return True
        if any(rest.startswith(start) for start in self._starts):
            return self._begin("", rest)
        if any(start.startswith(rest) for start in (PYTHON_TAG, *self._starts)):
            return False
        self._text_only = True
        if self.num_calls:
            self._pending = rest
        return True

    def _begin(self, opening: str, rest: str) -> bool:
        self._scanner, self._raw, self._announced = CallScanner(strict=not self._hermes), [opening], False
        self._pending = rest
        return bool(rest)

    # ---- inside of a call -------------------------------------------------------------------

    def _scan(self) -> bool:
        scanner = self._scanner
        assert scanner is not None, "no call is under way"
        text, self._pending = self._pending, ""
        if not self._announced:
            self._raw.append(text)
        arguments, rest = scanner.push(text)
        if scanner.name is not None and not self._announced:
            if self._hermes or scanner.name in self._names:
                self._announce(scanner.name)
            else:
                self._give_back(rest)
                return True
        if self._announced and arguments and self._shown:
            self._parts.append(CallPiece(self.num_calls - 1, None, arguments))
        if scanner.broken:
            self._give_back(rest)
            return True
        if not scanner.done:
            return False
        self._scanner, self._pending = None, rest
        self._at_start = self._behind_call = True
        return True

    def _announce(self, name: str) -> None:
        self._announced, self._raw = True, []
        self.num_calls += 1
        if self._shown:
            self._parts.append(CallPiece(self.num_calls - 1, name, ""))

    @property
    def _shown(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _give_back(self, rest: str) -> None:
        """Treat it as no call.  What was told of it cannot be taken back; the other is text.  rest: what broke it."""
        self._scanner = None
        if self._announced:
            self._skipping, self._pending = True, rest
            return
        opening, *read = self._raw
        self._parts.append(opening)
        self._pending, self._raw = "".join(read), []
        self._announced = True
        self._at_start = self._behind_call = False
        self._text_only = not self._hermes

    def _skip(self) -> bool:
        """Drop a broken call up to its closing marker; where there is none, up to the end of the output."""
        _, marker, rest = self._pending.partition(CALL_CLOSE)
        if not marker or not self._hermes:
            self._pending = self._pending[len(self._pending) - num_begun(self._pending, CALL_CLOSE) :]
            return False
        self._skipping, self._at_start, self._pending = False, True, rest
        return True
