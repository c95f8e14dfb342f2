"""The seam between conversations with pictures and their reader.

Owns: what a reader does.  Does not know: how pictures are given, fetched or decoded.
"""

from typing import Protocol

from engine.types.prompt import ChatTurn
from server.http.exchange import Exchange


class Sight(Protocol):
    """The reader of the pictures that clients give, where the model sees."""

    async def read(self, turns: tuple[ChatTurn, ...], exchange: Exchange) -> tuple[ChatTurn, ...]:
        """Return a conversation whose pictures are read.  exchange: of the request that has them.

        Raises RequestError for a picture that cannot be had, or is beyond a limit."""
