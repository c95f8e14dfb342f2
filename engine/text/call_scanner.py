"""One function call as JSON, read while it arrives: ``{"name": "f", "arguments": {"x": 1}}``.

Owns: where the name and the arguments begin and end.  Does not know: the text around it, which functions exist.
Arguments are passed on as they are written, without parsing, so a client that joins the pieces has the model's own
text.  Every character is read once.
"""

import re
from enum import Enum
from typing import Final

import msgspec

ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
_CALL_KEYS: Final = ARGUMENT_KEYS | {"name", "type", "id"}
_MAX_NAME_CHARS: Final = 256
_STRUCTURE: Final = re.compile(r'["{}\[\],]')
_IN_STRING: Final = re.compile(r'["\\]')


class _Broken(Exception):
    """Raised if the text is not a call.  at: where the faulty text begins, if not at the step."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at


class ValueEnd:
    """Finds the end of a JSON value that arrives in pieces by following strings and brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, at: int) -> int | None:
        """Return where the value ends, exclusive; None if it continues."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            character, at = found.group(), found.end()
            if self._in_string:
                self._escaped = character == "\\"
                self._in_string = self._escaped
                if not self._in_string and self._depth == 0:
                    return at
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif self._depth == 0:
                return at - 1  # a comma or bracket that belongs to the call's own object ends a number or a word
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at
        return None


class _Expect(Enum):
    OBJECT = "{"
    KEY = "key"
    COLON = ":"
    VALUE = "value"
    REST = "rest of a value"


class CallScanner:
    """Reads one call.

    strict: whether an object with an unknown key before its name is no call; for objects without a marker.
    name: None until it has been read.  done: the object has ended.  broken: it is no call; output so far stands.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._expect = _Expect.OBJECT
        self._key = ""
        self._value: list[str] = []
        self._end = ValueEnd()
        self._waiting: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def push(self, text: str) -> tuple[str, str]:
        """Return (arguments that are certain now, text from the end of the object or from the fault)."""
        at = 0
        try:
            while at < len(text) and not self.done:
                at = self._step(text, at)
        except _Broken as error:
            self.broken = True
            at = at if error.at is None else error.at
        if self.done and self.name is None:
            self.broken = True
        arguments = ""
        if self.name is not None:
            if self.done and not self._has_arguments:
                self._waiting.append("{}")
            arguments = "".join(self._waiting)
            self._waiting.clear()
        return arguments, text[at:]

    def _step(self, text: str, at: int) -> int:
        """Read some of the text; return where the rest begins."""
        if self._expect is _Expect.REST:
            return self._read_value(text, at)
        character = text[at]
        if character in " \t\r\n":
            return at + 1
        match self._expect:
            case _Expect.OBJECT:
                self._demand(character == "{")
                self._expect = _Expect.KEY
            case _Expect.KEY:
                return self._read_key(character, at)
            case _Expect.COLON:
                self._demand(character == ":")
                self._expect = _Expect.VALUE
            case _Expect.VALUE:
                self._expect = _Expect.REST
                return at
        return at + 1

    def _read_key(self, character: str, at: int) -> int:
        if character == "}":
            self.done = True
        elif character == '"':
            self._key = ""
            self._expect = _Expect.REST
            return at
        else:
            self._demand(character == ",")
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        """Read a part of a key or value, following strings and brackets to find its end."""
        end = self._end.find(text, at)
        piece = text[at : end if end is not None else len(text)]
        if self._key in ARGUMENT_KEYS and (self._value or piece[:1] == "{"):
            # An object is passed on at once; ``_value`` only marks that it has begun.
            self._value = self._value or [""]
            if self._value == [""]:
                self._waiting.append(piece)
                self._has_arguments = True
            else:
                self._value.append(piece)
        else:
            room = _MAX_NAME_CHARS - sum(map(len, self._value)) if self._key in ("", "name") else len(piece)
            if len(piece) > room:
                raise _Broken(at + room)
            self._value.append(piece)
        if end is None:
            return len(text)
        try:
            self._take_value("".join(self._value))
        except _Broken:
            raise _Broken(end) from None  # not at the beginning of the piece, which depends on the cuts
        return end

    def _take_value(self, value: str) -> None:
        self._value = []
        if not self._key:
            self._key = self._string(value)
            self._demand(bool(self._key) and (not self._strict or self.name is not None or self._key in _CALL_KEYS))
            self._expect = _Expect.COLON
            return
        if self._key == "name":
            self._demand(self.name is None)
            self.name = self._string(value)
            self._demand(bool(self.name))
        elif self._key in ARGUMENT_KEYS and value.startswith('"'):
            # Some models write the arguments as a string that holds JSON.
            self._waiting.append(self._string(value))
            self._has_arguments = True
        self._key = ""
        self._expect = _Expect.KEY

    def _string(self, value: str) -> str:
        try:
            return msgspec.json.decode(value, type=str)
        except (msgspec.MsgspecError, UnicodeError):
            raise _Broken from None

    def _demand(self, fine: bool) -> None:
        if not fine:
            raise _Broken
