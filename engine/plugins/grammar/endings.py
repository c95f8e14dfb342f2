"""The values of one output that are judged before it may end.

Owns: where they are in the output's text.  Does not know: schemas, masks, how tokens are made.
"""

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from engine.plugins.grammar.checks import Judge, Unjudged
from engine.text.reasoning import CLOSE, OPEN, Thinking

_MAX_DIGITS: Final = 4300  # as in Python's integers


def _float(text: str) -> float:
    """Return the number that a text with a point or an exponent is.  Raises ValueError if it cannot be judged."""
    if len(text) > _MAX_DIGITS or math.isinf(number := float(text)):
        raise ValueError(text[:_MAX_DIGITS])
    return number


_DECODER: Final = json.JSONDecoder(parse_float=_float)


class Ending:
    """The text of one output, and the judges of its values.

    pieces: bytes of each token.  calls: text before a call's arguments -> their judge, None if they are free.
    answer: judge of an output that is no call; None if it is free."""

    def __init__(
        self, pieces: Sequence[bytes], calls: Mapping[str, Judge | None], answer: Judge | None, thinking: Thinking
    ) -> None:
        self._pieces = pieces
        self._calls = calls
        self._answer = answer
        self._thinking = thinking  # until it is known that they have ended, or that there are none
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()  # that have not been decoded
        self._text = ""  # from where the next call is sought
        self._longest = max(map(len, calls), default=1)

    def consume(self, token_id: int) -> None:
        """Add a token to the output."""
        if token_id < len(self._pieces):
            self._bytes += self._pieces[token_id]

    def fault(self) -> tuple[str, bool]:
        """Return why the output must not end here, '' if it may, and whether more text cannot mend it."""
        self._text += self._decoder.decode(self._bytes)
        self._bytes.clear()
        self._leave_thoughts()
        try:
            if self._answer is not None and not self._text.lstrip().startswith(tuple(self._calls)):
                try:
                    return _broken(self._answer.fault(_DECODER.decode(self._text))), False
                except json.JSONDecodeError:
                    pass  # calls, or thoughts that have not ended
            return _broken(self._fault_of_calls()), True
        except Unjudged as error:
            return f"the output cannot be checked: {error}", True
        except RecursionError:
            return "the output cannot be checked: its values are nested too deep; make the schema flatter", True
        except ValueError:
            digits = f"a number has too many digits to be checked; at most {_MAX_DIGITS:,} are, and floats up to 1e308"
            return f"the output cannot be checked: {digits}", True

    def _leave_thoughts(self) -> None:
        """Leave thoughts that have ended out of the text."""
        begun = self._text.lstrip()
        if self._thinking == "optional" and not begun.startswith(OPEN):
            self._thinking = "optional" if OPEN.startswith(begun) else "none"
        elif self._thinking != "none" and CLOSE in self._text:
            self._text = self._text.partition(CLOSE)[2]
            self._thinking = "none"

    def _fault_of_calls(self) -> str:
        at = 0
        while found := [(place, begin) for begin in self._calls if (place := self._text.find(begin, at)) >= 0]:
            place, begin = min(found)
            try:
                value, at = _DECODER.raw_decode(self._text, place + len(begin))
            except json.JSONDecodeError:
                at = place + len(begin)  # free text, or a value that only quotes a call
                continue
            judge = self._calls[begin]
            if judge is not None and (fault := judge.fault(value)):
                return fault
        if self._answer is None and self._thinking == "none":
            self._text = self._text[max(at, len(self._text) - self._longest + 1) :]
        return ""


def _broken(fault: str) -> str:
    return fault and f"the output does not follow the schema: {fault}"
