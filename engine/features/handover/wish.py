"""The wishes of requests that concern other engines.

Owns: their form.  Does not know: how a wish is fulfilled.
"""

from typing import Final

import msgspec

from engine.features.handover.messages import NAME
from engine.types.prompt import RequestPart


class Wish(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request's wish.

    offer: keep the prompt's pages under this name, and end with the first token; '' for an ordinary request.
    peer: has pages of the prompt; '' for none.  claim: the name under which it offers them; '' for any that it has.
    id: unlike that of any other request."""

    offer: str = ""
    peer: str = ""
    claim: str = ""
    id: str = ""

    def parts(self) -> dict[str, RequestPart]:
        """Return it as the parts of a request."""
        return {NAME: RequestPart(digest="", data=msgspec.msgpack.encode(self))}


_wishes = msgspec.msgpack.Decoder(Wish)
NO_WISH: Final = Wish()


def wish_of(parts: dict[str, RequestPart]) -> Wish:
    """Return the wish of a request; that of a recorded one is empty."""
    part = parts.get(NAME)
    return _wishes.decode(part.data) if part is not None and part.data else NO_WISH
