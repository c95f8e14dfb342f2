"""The router's own server: the API, sent on, and /replicas, which says how they are, drains them and restarts them.

Owns: the routes, the life of the router.  Does not know: how a replica is started, what requests say.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from engine.config import Config
from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.access import check_access
from server.clients import Rates
from server.extensions.replicas.gauges import routed
from server.extensions.replicas.replicas import Fleet, Replicas
from server.extensions.replicas.routing import routing_named
from server.extensions.replicas.settings import ReplicasSettings
from server.http.connection import HttpRunner
from server.http.exchange import Traffic, note_route, refuse_foreign_page
from server.http.operation import Operation, operation
from server.http.replies import json_reply
from server.http.routes import ROUTES, Routes
from server.keys import Keys
from server.operators.administration import AdministrationRoutes
from server.operators.metrics import MetricsRoute
from server.operators.stats import StatsRoute
from server.operators.status import StatusRoutes
from server.proxy.administration import FleetAdministration
from server.proxy.affinity import PrefixAffinity
from server.proxy.observation import Observation
from server.proxy.proxy import Proxy, new_session
from server.proxy.replica import Replica, State, unavailable
from server.run.core import all_parts
from server.run.extension import declared, error_formats
from server.run.serve import listen_for_signals

log = logging.getLogger(__name__)


class ReplicaBody(msgspec.Struct, frozen=True):
    """A replica, with the fields of ``Replica``."""

    name: str
    state: str
    url: str
    open_requests: int
    sent_requests: int
    lost: int


class ReplicasBody(msgspec.Struct, frozen=True):
    """All replicas.  requests_with_prefix: requests that went where their prompt's beginning had gone before."""

    replicas: list[ReplicaBody]
    requests: int
    requests_with_prefix: int


class RouterRoutes:
    """Handles what the router answers itself."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @operation("GET", "/replicas", "operator")
    async def all(self, request: web.Request) -> web.Response:
        """GET /replicas."""
        replicas = self._replicas
        rows = [
            ReplicaBody(one.name, one.state.value, one.url, one.num_open, one.num_sent, one.num_lost)
            for one in replicas.all
        ]
        return json_reply(ReplicasBody(rows, replicas.num_requests, replicas.num_with_prefix))

    @operation("POST", "/replicas/{name}/drain", "operator")
    async def drain(self, request: web.Request) -> web.Response:
        """POST /replicas/{name}/drain: 202, and the replica ends when its requests have."""
        refuse_foreign_page(request)
        replica, state = self._named(request), State.DRAINING
        if replica.state in (State.READY, State.STARTING):
            self._begin([replica], self._replicas.drain(replica))
        else:
            state = replica.state
        return self._accepted(replica, state)

    @operation("POST", "/replicas/{name}/undrain", "operator")
    async def undrain(self, request: web.Request) -> web.Response:
        """POST /replicas/{name}/undrain: 202, and the replica takes requests again, or is started again."""
        refuse_foreign_page(request)
        replica = self._named(request)
        task = self._tasks.get(replica.name)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        await self._replicas.undrain(replica)
        return self._accepted(replica, replica.state)

    @operation("POST", "/replicas/restart", "operator", also=("/replicas/{name}/restart",))
    async def restart(self, request: web.Request) -> web.Response:
        """POST /replicas/restart and /replicas/{name}/restart: 202; all of them one after another, or one."""
        refuse_foreign_page(request)
        replicas = [self._named(request)] if "name" in request.match_info else self._replicas.all
        self._begin(replicas, self._replicas.restart(replicas))
        return json_reply({"restarting": [one.name for one in replicas]}, status=202)

    def _begin(self, replicas: list[Replica], work: Coroutine[None, None, None]) -> None:
        """Let it run.  Raises RequestError (409) if one of the replicas is drained or restarted already."""
        busy = [one.name for one in replicas if one.name in self._tasks and not self._tasks[one.name].done()]
        if busy:
            work.close()
            raise RequestError(
                f"{', '.join(busy)}: drained or restarted already; GET /replicas says how far that is",
                status=409,
                code="replica_busy",
            )
        task = asyncio.create_task(_logged(work), name="replicas")
        self._tasks.update(dict.fromkeys((one.name for one in replicas), task))

    def _named(self, request: web.Request) -> Replica:
        """The replica that a path names.  Raises RequestError (404)."""
        name = request.match_info["name"]
        replica = next((one for one in self._replicas.all if one.name == name), None)
        if replica is None:
            names = ", ".join(one.name for one in self._replicas.all)
            raise RequestError(f"there is no replica {name!r}; there are {names}", status=404, code="unknown_replica")
        return replica

    def _accepted(self, replica: Replica, state: State) -> web.Response:
        return json_reply({"name": replica.name, "state": state.value}, status=202)

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: whether a replica could take a request."""
        if not any(one.state is State.READY for one in self._replicas.all):
            raise unavailable("no replica is ready", "not_ready")
        return json_reply({"status": "ready"})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: that the router answers, and its replicas' states."""
        states = {one.name: one.state.value for one in self._replicas.all}
        return json_reply({"status": "ok", "replicas": states})


async def _logged(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("draining or restarting replicas has failed; GET /replicas says how they are")


async def route(
    config: Config,
    fleet: Fleet,
    listener: socket.socket,
    new_replicas: type[Replicas] = Replicas,
    new_proxy: type[Proxy] = Proxy,
    more: tuple[socket.socket, ...] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; then the replicas are drained and end, unless other routers use them.

    more: where it listens besides."""
    stop_requested = listen_for_signals(
        partial(log.info, "SIGHUP: server.key_file is read anew by itself; nothing else is")
    )
    with closing(fleet):
        async with routing(config, fleet, listener, new_replicas, new_proxy, more) as replicas:
            await stop_requested.wait()
            replicas.is_leaving = True
            log.info("draining: %d requests are open", sum(one.num_open for one in replicas.all))
            try:
                async with asyncio.timeout(config.server.drain_timeout_s), asyncio.TaskGroup() as draining:
                    for replica in replicas.all:
                        draining.create_task(replicas.leave(replica))
            except TimeoutError:
                log.warning("draining: %d requests end unfinished", sum(one.num_open for one in replicas.all))


@asynccontextmanager
async def routing(
    config: Config,
    fleet: Fleet,
    listener: socket.socket,
    new_replicas: type[Replicas] = Replicas,
    new_proxy: type[Proxy] = Proxy,
    more: tuple[socket.socket, ...] = (),
) -> AsyncIterator[Replicas]:
    """Let the router listen for as long as the context lasts; gives the replicas.  more: see ``route``."""
    server = config.server
    async with new_session(fleet.headers) as session, AsyncExitStack() as stack:
        affinity = PrefixAffinity()
        policy = routing_named(ReplicasSettings.of(config).routing)
        replicas = new_replicas(fleet, session, affinity, server.drain_timeout_s, policy)
        proxy = new_proxy(server, replicas, session, affinity, Rates(config.limits))
        app = _application(server, replicas, session, proxy)
        runner = HttpRunner(app, server, Traffic())
        stack.push_async_callback(runner.cleanup)
        await runner.listen(listener, *more)
        for replica in replicas.all:
            stack.callback(asyncio.create_task(replicas.watch(replica)).cancel)
            stack.callback(asyncio.create_task(replicas.follow(replica)).cancel)
        yield replicas


def _application(
    server: ServerSection, replicas: Replicas, session: aiohttp.ClientSession, proxy: Proxy
) -> web.Application:
    """Returns the router's application.  Whatever it does not answer itself, it sends on."""
    own, observation = RouterRoutes(replicas), Observation(replicas, session, lambda: routed(replicas))
    administration = FleetAdministration(server, replicas, session)
    routes, parts, keys = Routes(), all_parts(), Keys(server)
    for one in declared(parts):
        if one.generates:
            routes.handle(one, proxy.generate)
        elif one.gathered:
            routes.handle(one, administration.gather)
        elif one.replicated is not None:
            routes.handle(one, one.replicated)
        elif one.off is not None:
            routes.refuse(one)
    for handler, answer in (
        (StatusRoutes.health, own.health),
        (StatusRoutes.ready, own.ready),
        (StatusRoutes.load, observation.stats),
        (StatsRoute.get, observation.stats),
        (MetricsRoute.get, observation.metrics),
        (AdministrationRoutes.abort, administration.abort),
        (AdministrationRoutes.reset, administration.reset),
    ):
        routes.replace(handler, answer)
    routes.add(own)
    app = web.Application(middlewares=[note_route(routes, error_formats(parts)), check_access(keys)])
    routes.handle(Operation("*", "/{path:.*}", "client"), proxy.handle)
    app.add_routes(routes.definitions())
    app[ROUTES] = routes
    return app
