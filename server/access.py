"""The check of keys: each operation declares its access, and one middleware holds every request to it.

Owns: the check of keys, the audit log.  Does not know: which routes there are, what they do.
There is no default: a route that is not declared answers nothing.  Without clients' keys the routes of
clients are open on loopback, and those of operators need the token of ``local_token`` or ``server.operator_key``.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from engine.host.logs import FIELDS
from engine.types.errors import CallboardError, RequestError
from server.http.exchange import EXCHANGE, Exchange
from server.http.operation import Access, Handler
from server.http.routes import ROUTES
from server.keys import Key, Keys

audit_log = logging.getLogger("callboard.audit")

READING = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})
FREE_WRONG_KEYS = 20  # of one address in a minute, answered at once
WRONG_KEY_DELAY_S = 1.0
MOST_ADDRESSES = 4096  # whose wrong keys are counted
MINUTE_S = 60.0


def routes_of(app: web.Application) -> dict[tuple[str, str], Access]:
    """Returns the access of every route of an application, by its method and path.  Raises LookupError."""
    named = app[ROUTES].named
    found: dict[tuple[str, str], Access] = {}
    for route in app.router.routes():
        if route.resource is not None:
            one = route.method, route.resource.canonical
            if one not in named:
                raise LookupError(f"{one} does not declare its access")
            found[one] = named[one].access
    return found


def paths_for(app: web.Application, *kinds: Access) -> frozenset[str]:
    """Returns the paths of all routes with this access."""
    return frozenset(path for (_, path), kind in routes_of(app).items() if kind in kinds)


class WrongKeys:
    """Counts wrong keys by address, and says how long an answer to one waits.  clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def delay_s(self, address: str) -> float:
        """Count one.  Returns how long its answer waits; right keys never do."""
        now = self._clock()
        since, count = self._counts.pop(address, (now, 0))
        if now - since >= MINUTE_S:
            since, count = now, 0
        self._counts[address] = since, count + 1
        if len(self._counts) > MOST_ADDRESSES:
            self._counts.popitem(last=False)
        return WRONG_KEY_DELAY_S if count >= FREE_WRONG_KEYS else 0.0


def check_access(keys: Keys, wrong_keys: WrongKeys | None = None) -> Middleware:
    """Returns a middleware that holds requests to what their operations declare, and notes which key each has brought.

    It looks at the route that was matched, never at the URL: what is not matched is a client's."""
    wrong_keys = wrong_keys or WrongKeys()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        kind: Access = "client"
        if request.match_info.route.resource is not None:
            operation = request[EXCHANGE].operation
            if operation is None:
                raise LookupError(f"{request[EXCHANGE].route} does not declare its access")
            kind = operation.access
        if kind == "open" or (kind == "client" and not keys.of_clients):
            return await handler(request)
        key = keys.find(_given(request))
        if key is None:
            await asyncio.sleep(wrong_keys.delay_s(request[EXCHANGE].client))
            raise _no_key(kind, keys)
        exchange = request[EXCHANGE]
        exchange.key = key
        if kind != "operator":
            return await handler(request)
        if not key.is_operator:
            raise _no_operator(keys)
        return await _audited(request, handler, exchange, key)

    return check


def _given(request: web.Request) -> bytes:
    """Returns the key of a request; nothing if it has none."""
    # Anthropic's clients send the key in a header of its own.
    bearer = f"Bearer {request.headers.get('X-Api-Key', '')}"
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, bearer).partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _no_key(kind: Access, keys: Keys) -> RequestError:
    if keys.of_clients:
        reason = "a valid API key is required"
    elif keys.has_operators:
        reason = "this is an operator's: send server.operator_key, or the token that the server has written, as the key"
    else:
        return _no_operator(keys)
    return RequestError(reason, status=401, code="invalid_api_key")


def _no_operator(keys: Keys) -> RequestError:
    if keys.has_operators:
        reason = "this needs an operator's key: server.operator_key, or one of [operators] in server.key_file"
    else:
        reason = (
            "this is an operator's, and the server has no operator's key; "
            "set server.operator_key, or [operators] in server.key_file"
        )
    return RequestError(reason, status=403, code="operators_only")


async def _audited(request: web.Request, handler: Handler, exchange: Exchange, key: Key) -> web.StreamResponse:
    """Answer an operator's request; one that changes something is written down, whatever comes of it."""
    if request.method in READING:
        return await handler(request)
    outcome = "failed"
    try:
        response = await handler(request)
        outcome = str(response.status)
        return response
    except CallboardError as error:
        outcome = str(error.status) if isinstance(error, RequestError) else outcome
        raise
    finally:
        _write_down(request, exchange, key, outcome)


def _write_down(request: web.Request, exchange: Exchange, key: Key, outcome: str) -> None:
    fields = {
        "operator": key.name,
        "address": request.remote or "-",
        "method": request.method,
        "route": exchange.route,
        "outcome": outcome,
        "changed": ", ".join(exchange.changed) or "-",
        "request": exchange.id,
    }
    audit_log.info(" ".join(f"{name}=%({name})s" for name in fields), fields, extra={FIELDS: fields})
