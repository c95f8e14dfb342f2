"""Responses in one piece of JSON.

Owns: how they are made.  Does not know: what they say.
"""

import msgspec
from aiohttp import web


def json_reply(body: object, status: int = 200) -> web.Response:
    """A response with ``body`` as its JSON."""
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
