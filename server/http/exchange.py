"""One request and its response, whatever the application behind does: the outermost handler.

Owns: the request id, cross-origin headers, which hosts it is asked as, errors as responses, counts, the access log.
Does not know: routes' meaning, bodies, keys, the engine.
Every request passes ``OutermostHandler`` once, and no exception leaves it.  Counts are by the route's pattern and by
status, which are few, so no client can make them grow.

Cross-origin requests are off unless configured: then a browser keeps pages of other sites out by itself, since a
request that does anything carries JSON, about which it must ask first.  A route that acts without a body refuses them
with ``refuse_foreign_page``, and a page whose own name leads to this server by a trick of DNS is refused by ``Hosts``.
"""

import asyncio
import ipaddress
import logging
import string
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from engine.host.logs import FIELDS
from engine.scheduling.meter import LONG_S, Distribution
from engine.settings.sections import ServerSection
from engine.types.errors import CallboardError, RequestError
from server.http.bodies import Bodies
from server.http.operation import Handler, Operation
from server.http.replies import ErrorFormat, as_request_error, error_body, error_response
from server.http.routes import Routes
from server.http.turnstile import network_of
from server.keys import Key

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPICS_ID_HEADER = "request-id"  # what its clients call the same
PROCESSING_HEADER = "openai-processing-ms"
USAGE_HEADER = "X-Callboard-Usage"  # prompt and completion tokens, for a router
MAX_REQUEST_ID_CHARS = 128
SESSION_HEADERS = ("session_id", "session-id", "x-session-id")
MAX_SESSION_CHARS = 1024
# No space: what follows it would be a field of its own in a log.
PRINTABLE = frozenset(string.ascii_letters + string.digits + string.punctuation)
CLIENT_LEFT = 499  # what nginx logs for a client that left before the response
COUNTED_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ANY_ORIGIN = "*"
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
CORS_HEADERS = "Authorization, Content-Type, X-Request-Id"  # unless the browser says which the page wants to send
CORS_MAX_AGE_S = 600
PRIVATE_NAMES = (".localhost", ".internal")  # no public DNS has names that end so
OWN_PAGES = frozenset({"none", "same-origin"})  # of Sec-Fetch-Site; 'none' is what a user typed

HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})  # no route does anything for them
NO_SNIFF = {"X-Content-Type-Options": "nosniff"}  # no browser takes an answer for a script

Cut = Literal["too_many", "evicted", "header_timeout", "write_timeout", "malformed"]
ErrorFormats = Mapping[str, Callable[[str], ErrorFormat]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Exchange:
    """The facts about a request besides its body.

    id: the client's own if it sent a usable one.  route: the path's pattern, once one was matched.
    operation: what is declared of that route; None for a route that is not declared.
    names: what else the client may call it by.  parts: names of some of its choices -> which they are.
    session: the name of its session, '' for none.  cached_tokens: of its prompts, once they are counted.
    created_tokens: of these, those that it has put into the cache.
    opening: checksums of the system prompt and the tools of a request in a session.
    offered_session: the session that a header or an earlier response names, '' for none.
    notes: sentences on what was changed in the request before the model got it.
    usage: prompt and completion tokens.  Handlers that generate set these three.  tells_usage: a router wants to know.
    replica: which one has answered.
    key: which of the API keys it brought, where there are any.
    cors: the headers that a browser needs.  rates: those that say what is left of the client's minute.
    bodies: those under way of all requests of its server; None without a server.
    changed: names of the settings that an operator has changed by it.
    error_format: what errors look like to the route's clients.
    arrived_at, received_at, ended_at: when its first bytes were there, its headers were read, and the last byte of the
    answer was out, None until then; monotonic seconds.
    waits: since when and until when the connection took no more, monotonic seconds.
    was_received: whether a connection has just brought it; if not, it was there before the engine could take it."""

    def __init__(self, name: str, address: str) -> None:
        """Make that of a request that no connection waits for: its name and its address."""
        self.id = name
        self.route = "-"
        self.operation: Operation | None = None
        self.usage: tuple[int, int] | None = None
        self.tells_usage = False
        self.replica = ""
        self.names: set[str] = set()
        self.parts: Mapping[str, range] = {}
        self.notes: tuple[str, ...] = ()
        self.session = ""
        self.offered_session = ""
        self.opening = 0, 0
        self.created_tokens = 0
        self.cached_tokens = 0
        self.key: Key | None = None
        self._address = address
        self.cors: dict[str, str] = {}
        self.rates: dict[str, str] = {}
        self.changed: tuple[str, ...] = ()
        self.bodies: Bodies | None = None
        self.error_format: ErrorFormat = error_body
        self.received_at = time.monotonic()
        self.arrived_at = self.received_at
        self.ended_at: float | None = None
        self.waits: tuple[tuple[float, float], ...] = ()
        self.was_received = False
        self._has_connection = False

    @classmethod
    def of(cls, request: web.BaseRequest) -> "Exchange":
        """Returns what is known of a request that has just come."""
        exchange = cls(_request_id(request.headers.get(REQUEST_ID_HEADER, "")), network_of(request.remote or "-"))
        exchange.arrived_at = getattr(request.protocol, "arrived_at", exchange.received_at)
        exchange.was_received = exchange._has_connection = True
        given = (request.headers.get(name, "")[:MAX_SESSION_CHARS] for name in SESSION_HEADERS)
        exchange.offered_session = next(filter(PRINTABLE.issuperset, filter(None, given)), "")
        return exchange

    def answered(self) -> None:
        """Note that nothing more is generated.  With no connection to carry the answer, that is the request's end."""
        if not self._has_connection:
            self.ended_at = time.monotonic()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every response.  The server is named without versions, which only help an attacker."""
        told = {
            REQUEST_ID_HEADER: self.id,
            ANTHROPICS_ID_HEADER: self.id,
            PROCESSING_HEADER: f"{1000 * (time.monotonic() - self.received_at):.0f}",
            "Server": "callboard",
            **NO_SNIFF,
            **self.cors,
            **self.rates,
        }
        if self.tells_usage and self.usage is not None:
            told[USAGE_HEADER] = f"{self.usage[0]} {self.usage[1]}"
        return told

    @property
    def client(self) -> str:
        """The name of its key, or else its address; of IPv6 its /64, whose addresses one client may change between."""
        return self._address if self.key is None else self.key.name

    def log(self, request: web.BaseRequest, status: int, duration_s: float, *, is_news: bool = True) -> None:
        """One line per request.  The route is logged, not the path, which is the client's to choose."""
        told: dict[str, object] = {}
        if self.usage is not None:
            told["prompt_tokens"], told["completion_tokens"] = self.usage
        if self.replica:
            told["replica"] = self.replica
        fields = {
            "request": self.id,
            "client": self.client,
            "method": request.method,
            "route": self.route,
            "status": status,
            "duration_ms": round(duration_s * 1e3, 1),
            **told,
        }
        log.log(
            logging.INFO if is_news else logging.DEBUG,
            "request=%(request)s client=%(client)s %(method)s %(route)s status=%(status)d "
            "duration_ms=%(duration_ms).1f" + "".join(f" {name}=%({name})s" for name in told),
            fields,
            extra={FIELDS: fields},
        )


EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)


def note_route(routes: Routes, error_formats: ErrorFormats = MappingProxyType({})) -> Middleware:
    """Returns a middleware that notes the route, and what is declared of it.

    error_formats: beginning of paths with errors of their own -> returns their format for a request's id."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note the route: the library calls this after matching, also when nothing matched."""
        route = request.match_info.route
        if route.resource is not None:
            request[EXCHANGE].route = route.resource.canonical
            # By the route's method: a route of any method matches methods that have no name, such as QUERY.
            request[EXCHANGE].operation = routes.named.get((route.method, route.resource.canonical))
        for beginning, form in error_formats.items():
            if request.path.startswith(beginning):
                request[EXCHANGE].error_format = form(request[EXCHANGE].id)
        return await handler(request)

    return note


def _request_id(offered: str) -> str:
    usable = 1 <= len(offered) <= MAX_REQUEST_ID_CHARS and PRINTABLE.issuperset(offered)
    return offered if usable else f"req-{uuid.uuid4().hex}"


class Cors:
    """The headers that browsers need to read an answer.  origins: exactly as browsers send them, or '*' for any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Returns the headers that a response needs so that the page may read it."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._origins & {origin, ANY_ORIGIN}:
            return {}
        # Keys travel in a header and never in a cookie, so no page can use a visitor's.
        return {
            hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
            hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "X-Request-Id, request-id, openai-processing-ms, Retry-After, Warning",
            hdrs.VARY: hdrs.ORIGIN,
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Returns the answer to a browser that asks before it sends something; None if this is no such question."""
        if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        if not self.headers(request):
            return None
        # Any header: clients send their own (the OpenAI one a dozen), and none that is not known here does anything.
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS) or CORS_HEADERS
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: CORS_METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
                hdrs.ACCESS_CONTROL_MAX_AGE: str(CORS_MAX_AGE_S),
            },
        )


class Hosts:
    """Refuses requests for names that cannot be this server's, where no key keeps strangers out.

    The owner of a public name may let it lead to 127.0.0.1 once a browser has loaded a page from it ("DNS rebinding"):
    to the browser this server is then part of that page's own site.  Only the name gives it away."""

    def __init__(self, server: ServerSection) -> None:
        names = {name.lower() for name in server.allowed_hosts}
        self._takes_all = server.needs_key or ANY_ORIGIN in names
        self._names = names

    def check(self, request: web.BaseRequest) -> None:
        """Raise RequestError (403) for the public name of another server."""
        if self._takes_all or (host := request.headers.get(hdrs.HOST)) is None:
            return
        name = _host_name(host)
        address = _address(name)
        # The unspecified address leads to loopback, and is the name of no server.
        is_foreign = ("." in name and not name.endswith(PRIVATE_NAMES)) if address is None else address.is_unspecified
        if is_foreign and name not in self._names:
            raise RequestError(
                f"this server is not known as '{name[:100]}'; name it in server.allowed_hosts, or set server.api_key",
                status=403,
                code="unknown_host",
            )


def _host_name(host: str) -> str:
    """Returns a Host header without its port, in small letters and without the dot that may end a name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address that a name is, if it is one."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def refuse_foreign_origin(request: web.BaseRequest) -> None:
    """Raise RequestError (403) for what a page of another origin sends, unless ``server.cors_origins`` names it.

    All browsers say where such a request is from; few of old, and none on http://0.0.0.0, say ``Sec-Fetch-Site``."""
    origin = request.headers.get(hdrs.ORIGIN)
    if request.method in HARMLESS or origin is None or request[EXCHANGE].cors:
        return
    if origin.partition("://")[2].lower() != request.headers.get(hdrs.HOST, "").lower():
        raise _foreign()


def refuse_foreign_page(request: web.Request) -> None:
    """Raise RequestError (403) for a browser on a page of another site, unless ``server.cors_origins`` names it.

    A browser sends a request without a body of JSON before it asks whether it may, and says where it comes from."""
    if request.headers.get("Sec-Fetch-Site", "none") not in OWN_PAGES and not request[EXCHANGE].cors:
        raise _foreign()


def _foreign() -> RequestError:
    return RequestError(
        "a page of another site may not ask for this; name its origin in server.cors_origins",
        status=403,
        code="foreign_page",
    )


class Traffic:
    """Counts.  requests: (method, route, status) -> how many have ended.  refusals: error code -> how many.
    num_in_flight: requests being handled now."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Distribution] = {}
        self.refusals: Counter[str] = Counter()
        self.cuts: Counter[Cut] = Counter()
        self.num_connections = 0
        self.num_in_flight = 0

    def ended(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count a request that has had its response, or whose client has left."""
        self.requests[method if method in COUNTED_METHODS else "other", route, status] += 1
        durations = self.durations.get(route)
        if durations is None:
            durations = self.durations[route] = Distribution(LONG_S)
        durations.note(duration_s)


class OutermostHandler:
    """Wraps the application's handler: makes the exchange, answers errors, counts and logs."""

    def __init__(self, inner: BaseHandler, traffic: Traffic, server: ServerSection) -> None:
        self._inner = inner
        self._cors = Cors(server.cors_origins)
        self._hosts = Hosts(server)
        self._bodies = Bodies()
        self._traffic = traffic
        self._watched: dict[str, int] = {}  # route -> the status it was last answered with

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; raises only what ends the connection."""
        exchange = request[EXCHANGE] = Exchange.of(request)
        exchange.cors, exchange.bodies = self._cors.headers(request), self._bodies
        clock = asyncio.get_running_loop().time
        started = clock()
        status = CLIENT_LEFT
        self._traffic.num_in_flight += 1
        try:
            response = await self._respond(request, exchange)
            status = response.status
            return response
        finally:
            exchange.ended_at = time.monotonic()  # until what is left of a response is out as well
            duration_s = clock() - started
            self._traffic.num_in_flight -= 1
            self._traffic.ended(request.method, exchange.route, status, duration_s)
            exchange.log(request, status, duration_s, is_news=self._is_news(exchange, status))

    def _is_news(self, exchange: Exchange, status: int) -> bool:
        """Returns False for a polled route while all is well, and while the server is not ready yet."""
        if exchange.operation is None or not exchange.operation.polled:
            return True
        route, unready = exchange.route, HTTPStatus.SERVICE_UNAVAILABLE  # as it is before it is ready
        before, self._watched[route] = self._watched.get(route, unready), status
        return status >= HTTPStatus.BAD_REQUEST and not status == before == unready

    async def _respond(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        try:
            self._hosts.check(request)
            refuse_foreign_origin(request)
            response = self._cors.preflight(request) or await self._inner(request)
        except ConnectionError:
            raise  # aiohttp closes what is left of the connection
        except Exception as error:
            if not isinstance(error, (CallboardError, web.HTTPException)):
                log.exception("request=%s failed", exchange.id)
            refusal = as_request_error(error)
            if refusal.retry_after_s is not None:
                self._traffic.refusals[refusal.code] += 1
            response = error_response(refusal, exchange.error_format)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            if response.status in (408, 413):
                response.force_close()  # the rest of the body is not worth reading
        if not response.prepared:
            response.headers.update(exchange.headers)
        return response
