"""Events that say no more than a piece of text: most of a stream, and alike but for that piece.

Owns: what is the same in all of them, encoded once for each choice.  Does not know: endpoints' formats; it finds the
text in an event that they make.  Saves three quarters of what an event costs to make.
"""

from collections.abc import Callable, Sequence

import msgspec

from engine.messages import Delta

MARK = "\ue000text\ue000"  # of a private plane of Unicode: in no model's name
TOKENS = (b"\0\0\0\0", b"\1\0\0\0\2\0\0\0")  # one, and two others


class PlainText:
    """Makes the events of one choice from parts that are encoded once."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._encode = msgspec.json.Encoder().encode

    @classmethod
    def like(cls, render: Callable[[Delta], Sequence[msgspec.Struct]]) -> "PlainText | None":
        """Returns the parts of what ``render`` makes of a piece of text in the middle of a stream.

        None if that is not one event, or one that says more of a token than its text."""
        one, other = (render(Delta(0, MARK, token_ids)) for token_ids in TOKENS)
        if len(one) != 1 or one != other:
            return None
        before, mark, after = msgspec.json.encode(one[0]).partition(msgspec.json.encode(MARK))
        return cls(b"data: " + before, after + b"\n\n") if mark else None

    def event(self, delta: Delta) -> bytes:
        """The event of a delta that ``is_plain``."""
        return b"%b%b%b" % (self._before, self._encode(delta.text), self._after)


def is_plain(delta: Delta) -> bool:
    """Whether there is nothing in it but text, or a token that has none yet."""
    return bool(delta.token_ids) and delta == Delta(delta.request_id, delta.text, delta.token_ids)
