"""Messages as bytes: msgpack with a tag per type and a length limit.  Nothing on any wire is pickled."""

from typing import Any

import msgspec

from engine.messages import Abort, Deltas, Failed
from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.messages import AnyMessage

MAX_FRAME_BYTES = 64 << 20


class WireError(CallboardError):
    """A frame is too long, cut short or not a known message; or a message cannot be sent."""


class Wire:
    """Encoder and decoder of one link; not shared between threads.

    accepts: the union of messages that may arrive on it; other messages are refused."""

    def __init__(self, name: str, max_frame_bytes: int = MAX_FRAME_BYTES, accepts: Any = AnyMessage) -> None:
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(accepts, strict=True)

    def encode(self, message: Message) -> bytes:
        """Return the frame of a message.  Raises WireError if it is over the limit or cannot be encoded."""
        try:
            frame = self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise WireError(f"link {self._name}: {type(message).__name__}: not valid Unicode: {error.reason}") from None
        except (TypeError, OverflowError) as error:  # a field holds, for example, an integer of over 64 bits
            raise WireError(f"link {self._name}: {type(message).__name__}: {error}") from None
        if len(frame) > self._max_frame_bytes:
            kind = type(message).__name__
            raise WireError(f"link {self._name}: {kind} of {len(frame)} bytes exceeds {self._max_frame_bytes}")
        return frame

    def decode(self, frame: bytes) -> AnyMessage:
        """Return the message in a frame.  Raises WireError for anything that is not one."""
        if len(frame) > self._max_frame_bytes:
            raise WireError(f"link {self._name}: frame of {len(frame)} bytes exceeds {self._max_frame_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"link {self._name}: not a message: {error}") from None


def in_parts(message: Deltas, error: WireError) -> tuple[Deltas, Deltas] | tuple[Abort, Failed]:
    """Return replacements for deltas too large for a frame: two halves, or the end of the one request."""
    if len(message.deltas) > 1:
        middle = len(message.deltas) // 2
        return Deltas(deltas=message.deltas[:middle]), Deltas(deltas=message.deltas[middle:])
    request_id = message.deltas[0].request_id
    return Abort(request_id=request_id), Failed(
        request_id=request_id, message=f"the output is too large: {error}", status=413, code="output_too_large"
    )
