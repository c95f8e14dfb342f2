"""A base for tool parsers: one function reads the output from its beginning to its end.

Owns: waiting for text, and returning as text what turns out to be no call.
Does not know: any format.
Every reading function decides by the whole output and never by where a piece ends.  So a parser made of them gives the
same result for any way of cutting the output.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

import msgspec

from engine.text.call_scanner import CallScanner, ValueEnd
from engine.text.reasoning import num_begun
from engine.text.tool_calls import CallPiece, OutputPart

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # use it with ``yield from``; it pauses until there is more text

MAX_NAME_CHARS: Final = 256
_NAME: Final = re.compile(r"[\w.-]+")


class CallReader:
    """A tool parser; a subclass implements ``read``.  cut_off: as in ``ToolParser``."""

    def __init__(self) -> None:
        self.cut_off = False
        self.num_calls = 0
        self._pending = ""
        self._ended = False
        self._parts: list[OutputPart] = []
        self._raw: list[str] | None = None  # text read since ``begin``, which may turn out to be no call
        self._in_text = False  # whether white space now belongs to the text
        self._reading = self.read()
        next(self._reading, None)

    def read(self) -> Reading[None]:
        """Read one output up to its end."""
        raise NotImplementedError

    def push(self, text: str) -> list[OutputPart]:
        if text:
            self._pending += text
            next(self._reading, None)
        return self._take_parts()

    def finish(self) -> list[OutputPart]:
        self._ended = True
        next(self._reading, None)
        return self._take_parts()

    def _take_parts(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return parts

    # ---- output -----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Append text of the answer to the output."""
        if text:
            self._parts.append(text)

    def call(self, name: str) -> None:
        """Append the beginning of a call, which cannot be taken back."""
        self._raw, self._in_text = None, False
        self._parts.append(CallPiece(self.num_calls, name, ""))
        self.num_calls += 1

    def argue(self, arguments: str) -> None:
        """Append a part of the last call's arguments."""
        if arguments:
            self._parts.append(CallPiece(self.num_calls - 1, None, arguments))

    def begin(self, marker: str = "") -> None:
        """Start what may become a call.  marker: its part that has been read already."""
        self._raw = [marker]

    def give_back(self) -> None:
        """Undo ``begin``: the marker is text, and the text after it is read again."""
        assert self._raw is not None, "a call that was named cannot be taken back"
        marker, *read = self._raw
        self.say(marker)
        self._pending = "".join(read) + self._pending
        self._raw, self._in_text = None, True

    # ---- reading ----------------------------------------------------------------------------

    def _consume(self, num_chars: int) -> str:
        text, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        if self._raw is not None and text:
            self._raw.append(text)
        return text

    def more(self) -> Reading[bool]:
        """Wait for text.  Returns False at the end."""
        while not self._pending:
            if self._ended:
                return False
            yield
        return True

    def space(self, besides: str = "") -> Reading[str]:
        """Read white space.  besides: characters to skip as well."""
        read = []
        while (yield from self.more()):
            text = self._pending.lstrip()
            while besides and text.lstrip(besides) != text:
                text = text.lstrip(besides).lstrip()
            read.append(self._consume(len(self._pending) - len(text)))
            if text:
                break
        return "".join(read)

    def next_is(self, *literals: str) -> Reading[str]:
        """Return the longest of the literals that the text begins with, without reading it; '' if there is none."""
        ordered = sorted(literals, key=len, reverse=True)
        while not self._ended and any(
            len(one) > len(self._pending) and one.startswith(self._pending) for one in ordered
        ):
            yield
        return next((one for one in ordered if self._pending.startswith(one)), "")

    def accept(self, *literals: str) -> Reading[str]:
        """Read and return the longest of the literals that the text begins with; '' if there is none."""
        return self._consume(len((yield from self.next_is(*literals))))

    def until(self, *markers: str) -> Reading[str]:
        """Read up to and including the first marker; append the text before it.  Returns the marker, '' at the end.

        No marker may be the beginning of another one."""
        while True:
            before, marker = self._certain(markers)
            self.say(self._consume(len(before)))
            if marker:
                return self._consume(len(marker))
            if not (yield from self._grown()):
                self.say(self._consume(len(self._pending)))
                return ""

    def word(self, *ends: str, at_most: int | None = MAX_NAME_CHARS) -> Reading[str | None]:
        """Read and return the text before the first of ``ends``; None if none comes within ``at_most`` characters."""
        read: list[str] = []
        while True:
            before, end = self._certain(ends)
            read.append(self._consume(len(before)))
            if at_most is not None and sum(map(len, read)) > at_most:
                return None
            if end:
                return "".join(read)
            if not (yield from self._grown()):
                return None

    def skip(self, end: str) -> Reading[bool]:
        """Read up to and including ``end`` and drop it.  Returns False if ``end`` does not come."""
        return (yield from self.value_until(end)) is not None

    def drop_rest(self) -> Reading[None]:
        """Read the remaining output and drop it."""
        while (yield from self.more()):
            self._consume(len(self._pending))

    def rest(self) -> Reading[None]:
        """Append the remaining output as text."""
        while (yield from self.more()):
            self.say(self._consume(len(self._pending)))

    def text_until(self, *markers: str) -> Reading[str]:
        """Do as ``until``, but drop white space before the first call and around later ones."""
        if not self._in_text:
            space = yield from self.space()
            if marker := (yield from self.accept(*markers)):
                return marker
            if not self.num_calls:
                self.say(space)
            else:
                self.drop_begun(*markers)
        return (yield from self.until(*markers))

    def close(self, *ends: str) -> Reading[None]:
        """Read the marks after a call; each may be missing, or cut off by the end of the output."""
        for end in ends:
            yield from self.space()
            if not (yield from self.accept(end)):
                self.drop_begun(end)

    def drop_begun(self, *markers: str) -> None:
        """Drop the beginning of a marker if the output ends there after a call."""
        if self._ended and any(one.startswith(self._pending) for one in markers):
            self._consume(len(self._pending))

    # ---- calls in JSON ----------------------------------------------------------------------

    def json_arguments(self) -> Reading[None]:
        """Append a JSON object, as it is written, as the arguments; an empty one if anything else follows."""
        yield from self.space()
        if not (yield from self.more()):
            self.cut_off = True
            return
        if not self._pending.startswith("{"):
            self.argue("{}")
            return
        value = ValueEnd()
        while (yield from self.more()):
            end = value.find(self._pending, 0)
            self.argue(self._consume(len(self._pending) if end is None else end))
            if end is not None:
                return
        self.cut_off = True

    def named_object(self, *, strict: bool, known: frozenset[str] | None = None) -> Reading[bool]:
        """Read a call written as an object with a name and arguments.  Returns whether it was whole.

        strict: as in ``CallScanner``.  known: an object that names another function is no call.
        If the call was not named, the caller must undo ``begin``."""
        scanner = CallScanner(strict=strict)
        named = False
        while (yield from self.more()):
            arguments, rest = scanner.push(self._pending)
            self._consume(len(self._pending) - len(rest))
            if scanner.name is not None and not named:
                if known is not None and scanner.name not in known:
                    return False
                named = True
                self.call(scanner.name)
            if named:
                self.argue(arguments)
            if scanner.broken or scanner.done:
                return not scanner.broken
        return False

    @property
    def told(self) -> bool:
        """Whether the call since ``begin`` was named."""
        return self._raw is None

    def scan(self, find: Callable[[str], int | None]) -> Reading[str | None]:
        """Return the text before the place that ``find`` finds; None if there is none up to the end.

        find: returns how much of the next piece belongs to the text; None for all of it."""
        read = []
        while (yield from self.more()):
            end = find(self._pending)
            read.append(self._consume(len(self._pending) if end is None else end))
            if end is not None:
                return "".join(read)
        return None

    # ---- values that are no JSON ------------------------------------------------------------

    def argument(self, key: str, schema: object, end: str, *, first: bool, trim: str = "") -> Reading[bool]:
        """Append an argument whose value is the text up to ``end``.  Returns whether ``end`` came.

        schema: of the value; a string is appended as it comes.  trim: dropped once before ``end``."""
        self.argue(f"{'' if first else ', '}{as_json(key)}: ")
        types = _types(schema)
        ends = (trim + end, end) if trim else (end,)
        streamed = types == {"string"}
        if streamed:
            self.argue('"')
        read: list[str] = []
        while True:
            before, found = self._certain(ends)
            read.append(self._consume(len(before)))
            if streamed:
                self.argue(as_json(read.pop())[1:-1])
            if found:
                break
            if not (yield from self._grown()):
                self._consume(len(self._pending))  # it may be the beginning of the end
                return False
        self._consume(len(found))
        self.argue('"' if streamed else _value("".join(read), types))
        return True

    def value_until(self, end: str) -> Reading[str | None]:
        """Read up to and including ``end``; return the text before it, None if ``end`` does not come."""
        text = yield from self.word(end, at_most=None)
        self._consume(len(self._pending if text is None else end))
        return text

    # ---- what is certain --------------------------------------------------------------------

    def _certain(self, markers: tuple[str, ...]) -> tuple[str, str]:
        """Return (text before any marker, the marker after it or '')."""
        text = self._pending
        found = [(at, -len(one), one) for one in markers if (at := text.find(one)) >= 0]
        # An incomplete marker at the end may begin before a complete one.
        held = max(num_begun(text, one) for one in markers)
        if found:
            at, _, marker = min(found)
            return text[:at], marker
        return text[: len(text) - held], ""

    def _grown(self) -> Reading[bool]:
        """Wait until there is more text than now.  Returns False at the end."""
        num_chars = len(self._pending)
        while len(self._pending) == num_chars:
            if self._ended:
                return False
            yield
        return True


def is_name(text: str) -> bool:
    """Return whether a function could have this name."""
    return _NAME.fullmatch(text) is not None


def as_json(value: object) -> str:
    """Return a value as JSON.  Raises ValueError or TypeError for one that JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_text(text) else json.dumps(value, allow_nan=False)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only escape
        return False
    return True


_WORDS: Final = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_JSON_TYPES: Final = {
    dict: {"object"}, list: {"array"}, str: {"string"}, bool: {"boolean"},
    int: {"integer", "number"}, float: {"number"}, type(None): {"null"},
}  # fmt: skip


def _types(schema: object) -> set[str]:
    """Return the types that a schema plainly allows; empty if it has none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    if given is None:
        alternatives = schema.get("anyOf") or schema.get("oneOf") or ()
        each = [_types(one) for one in alternatives if isinstance(alternatives, list)]
        return set().union(*each) if all(each) else set()
    return {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}


def _value(text: str, types: set[str]) -> str:
    """Return the JSON of a value that was written as text: a string, unless the text is JSON of an allowed type."""
    written = _WORDS.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(written)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return as_json(text)
    return written if not types or types & _JSON_TYPES[type(value)] else as_json(text)
