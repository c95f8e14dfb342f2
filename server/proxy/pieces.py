"""A request's body on its way to a replica, in pieces that are not joined before the kernel copies them.

Owns: how the pieces are written.  Does not know: what is in them.
aiohttp joins a body with its header, which for a prompt of hundreds of KB is one more copy.
"""

from collections.abc import Sequence
from typing import Final

from aiohttp import Payload
from aiohttp.abc import AbstractStreamWriter

JOINED_BELOW: Final = 16 << 10  # bytes; a short body is one write with its header


class BodyPieces(Payload):
    """The pieces, one after another.  It can be written more than once."""

    _value: Sequence[bytes]

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(pieces)
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def as_bytes(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"".join(self._value)

    async def write(self, writer: AbstractStreamWriter) -> None:
        if self._size is not None and self._size < JOINED_BELOW:
            await writer.write(b"".join(self._value))
            return
        await writer.write(b"")  # the header, alone
        for piece in self._value:
            await writer.write(piece)
