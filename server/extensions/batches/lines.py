"""The lines of a batch's input: what is checked of them before any of them runs.

Owns: those checks.  Does not know: tables, what a body means.
"""

import codecs
from pathlib import Path
from typing import BinaryIO

import msgspec

from server.extensions.batches.objects import InputBody, InputLine, LineError
from server.http.body import name_field

MAX_LINES = 50_000
MAX_ERRORS = 100
MARK = codecs.BOM_UTF8  # that some editors begin a file with
SLACK_BYTES = 8 << 10  # that a line may have around its body


class FoundLine(msgspec.Struct, frozen=True):
    """A line of a file.  number: counts from 1.  start, length: where it is in the file, in bytes."""

    number: int
    custom_id: str
    start: int
    length: int


class LineReader:
    """Reads an input file from its beginning.  errors: what is wrong with it, as far as it has been read."""

    def __init__(self, path: Path, endpoint: str, max_body_bytes: int) -> None:
        self.errors: list[LineError] = []
        self.num_lines = 0
        self.at_end = False
        self._path = path
        self._endpoint = endpoint
        self._max_bytes = max_body_bytes + SLACK_BYTES
        self._line = msgspec.json.Decoder(InputLine)
        self._body = msgspec.json.Decoder(InputBody)
        self._at = 0
        self._number = 0

    def read(self, count: int) -> list[FoundLine]:
        """Returns up to ``count`` more that can be run.  Raises OSError."""
        found: list[FoundLine] = []
        with self._path.open("rb") as file:
            if not self._at and file.read(len(MARK)) == MARK:
                self._at = len(MARK)
            file.seek(self._at)
            while len(found) < count and not self.at_end:
                if (line := self._next(file)) is not None:
                    found.append(line)
        return found

    def wrong(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        """Note an error; after so many no more is read."""
        self.errors.append(LineError(code=code, line=line, message=message, param=param))
        self.at_end |= len(self.errors) >= MAX_ERRORS

    def _next(self, file: BinaryIO) -> FoundLine | None:
        start, data = self._at, file.readline(self._max_bytes + 1)
        self._at += len(data)
        if not data:
            self.at_end = True
            return None
        self._number += 1
        if len(data) > self._max_bytes:
            self.wrong("line_too_long", f"the line is longer than {self._max_bytes} bytes", self._number)
            self.at_end = True
            return None
        if not data.strip():
            return None
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            self.wrong("too_many_lines", f"the file has more than {MAX_LINES} lines", self._number)
            self.at_end = True
            return None
        line = self._understood(data)
        return None if line is None else FoundLine(self._number, line.custom_id, start, len(data))

    def _understood(self, data: bytes) -> InputLine | None:
        number = self._number
        try:
            data.decode()
            line = self._line.decode(data)
            body = self._body.decode(line.body)
        except msgspec.ValidationError as error:
            message, param = name_field(str(error))
            self.wrong("invalid_line", message.replace("the body:", "the line, or its body:"), number, param)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.wrong("invalid_json_line", f"the line is not valid JSON: {error}", number)
        else:
            if line.url != self._endpoint:
                reason = f"url: '{line.url[:100]}' is not '{self._endpoint}', the batch's endpoint"
                self.wrong("mismatched_url", reason, number, "url")
            elif body.stream:
                self.wrong("invalid_line", "body.stream: must be false, a batch has no streams", number, "body.stream")
            else:
                return line
        return None
