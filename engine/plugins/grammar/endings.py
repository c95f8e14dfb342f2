"""The values of one output that are judged before it may end.

Owns: where they are in the output's text.  Does not know: schemas, masks, how tokens are made.
"""

import json
from collections.abc import Sequence
from typing import Final

from engine.plugins.grammar.checks import Judge, Unjudged
from engine.text.reasoning import CLOSE, OPEN, Thinking

_DECODER: Final = json.JSONDecoder()


class Ending:
    """The text of one output, and the judges of its values.

    pieces: bytes of each token.  calls: text before a call's arguments -> their judge.  answer: judge of an output that
    is no call; None if it is free."""

    def __init__(
        self, pieces: Sequence[bytes], calls: dict[str, Judge], answer: Judge | None, thinking: Thinking
    ) -> None:
        self._pieces = pieces
        self._calls = calls
        self._answer = answer
        self._thinking = thinking
        self._bytes = bytearray()
        self._at = 0  # calls before this character have been judged

    def consume(self, token_id: int) -> None:
        """Add a token to the output."""
        if token_id < len(self._pieces):
            self._bytes += self._pieces[token_id]

    def fault(self) -> tuple[str, bool]:
        """Return why the output must not end here, '' if it may, and whether more text cannot mend it."""
        text = self._bytes.decode(errors="replace")
        thought = self._thinking == "open" or (self._thinking == "optional" and text.lstrip().startswith(OPEN))
        if thought and CLOSE in text:
            text = text[text.index(CLOSE) + len(CLOSE) :]
        try:
            if found := self._fault_of_calls(text):
                return found, True
            if self._answer is not None and not self._at:
                value, _ = _DECODER.raw_decode(text.lstrip())
                return self._answer.fault(value), False
        except (Unjudged, RecursionError) as error:
            return str(error) or "it is nested too deep to be checked", True
        except json.JSONDecodeError:
            pass  # calls, or thoughts that have not ended
        return "", False

    def _fault_of_calls(self, text: str) -> str:
        while True:
            found = [(at, begin) for begin in self._calls if (at := text.find(begin, self._at)) >= 0]
            if not found:
                return ""
            at, begin = min(found)
            value, self._at = _DECODER.raw_decode(text, at + len(begin))
            if fault := self._calls[begin].fault(value):
                return fault
