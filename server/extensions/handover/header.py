"""The header by which a router names the engine that has a prompt's pages.

Owns: its form.  Does not know: how pages move.
"""

from typing import Final

import msgspec
from aiohttp import web

from engine.features.handover.wish import Wish
from engine.types.errors import RequestError
from engine.types.prompt import RequestPart

HEADER: Final = "X-Callboard-Handover"
MOST_CHARS: Final = 64


class HandoverHeader(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of the header, as JSON.  Its fields are those of a ``Wish``."""

    offer: str = ""
    peer: str = ""
    claim: str = ""
    id: str = ""

    def as_headers(self) -> dict[str, str]:
        """Return it as headers of a request."""
        return {HEADER: msgspec.json.encode(self).decode()}


def parts_of(request: web.Request) -> dict[str, RequestPart]:
    """Return the parts of a request with the header; none without.  Raises RequestError for a malformed one."""
    text = request.headers.get(HEADER)
    if text is None:
        return {}
    try:
        given = msgspec.json.decode(text, type=HandoverHeader)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RequestError(f"{HEADER}: {error}", code="malformed_header") from None
    values = msgspec.structs.asdict(given)
    if any(len(value) > MOST_CHARS for value in values.values()):
        raise RequestError(f"{HEADER}: a name has more than {MOST_CHARS} characters", code="malformed_header")
    return Wish(**values).parts()
