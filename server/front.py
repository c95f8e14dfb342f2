"""The outermost handler: every request passes here once, and no exception passes at all.

Owns: the exchange of each request, turning exceptions into error responses, the access log.
Does not know: routes, bodies, the engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.errors import CallboardError
from server.errors import as_request_error, error_response
from server.exchange import CLIENT_LEFT, EXCHANGE, Exchange

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Front:
    """Wraps the application's handler."""

    def __init__(self, inner: Handler) -> None:
        self._inner = inner

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's request handler."""
        exchange = request[EXCHANGE] = Exchange(request)
        clock = asyncio.get_running_loop().time
        started = clock()
        status = CLIENT_LEFT
        try:
            response = await self._respond(request, exchange)
            status = response.status
            return response
        finally:
            exchange.log(request, status, clock() - started)

    async def _respond(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        try:
            response = await self._inner(request)
        except ConnectionError:
            raise  # aiohttp closes what is left of the connection
        except Exception as error:
            if not isinstance(error, (CallboardError, web.HTTPException)):
                log.exception("request=%s failed", exchange.id)
            response = error_response(as_request_error(error))
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            if response.status in (408, 413):
                response.force_close()  # the rest of the body is not worth reading
        if not response.prepared:
            response.headers.update(exchange.headers)
        return response
