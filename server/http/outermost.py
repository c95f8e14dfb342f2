"""The outermost handler: every request passes through it once, and no exception leaves it.

Owns: the exchange of each request, turning exceptions into error responses, the access log.
Does not know: routes, bodies, the engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.errors import CallboardError
from server.http.cors import Cors
from server.http.exchange import CLIENT_LEFT, EXCHANGE, Exchange
from server.http.replies import as_request_error, error_response
from server.http.traffic import Traffic

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class OutermostHandler:
    """Wraps the application's handler: makes the exchange, answers errors, counts and logs."""

    def __init__(self, inner: Handler, traffic: Traffic, cors: Cors) -> None:
        self._inner = inner
        self._cors = cors
        self._traffic = traffic

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises only what ends the connection."""
        exchange = request[EXCHANGE] = Exchange(request)
        exchange.cors = self._cors.headers(request)
        clock = asyncio.get_running_loop().time
        started = clock()
        status = CLIENT_LEFT
        self._traffic.num_in_flight += 1
        try:
            response = await self._respond(request, exchange)
            status = response.status
            return response
        finally:
            duration_s = clock() - started
            self._traffic.num_in_flight -= 1
            self._traffic.ended(request.method, exchange.route, status, duration_s)
            exchange.log(request, status, duration_s)

    async def _respond(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        try:
            response = self._cors.preflight(request) or await self._inner(request)
        except ConnectionError:
            raise  # aiohttp closes what is left of the connection
        except Exception as error:
            if not isinstance(error, (CallboardError, web.HTTPException)):
                log.exception("request=%s failed", exchange.id)
            refusal = as_request_error(error)
            if refusal.retry_after_s is not None:
                self._traffic.refusals[refusal.code] += 1
            response = error_response(refusal)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            if response.status in (408, 413):
                response.force_close()  # the rest of the body is not worth reading
        if not response.prepared:
            response.headers.update(exchange.headers)
        return response
