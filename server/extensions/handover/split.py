"""The router of a split engine: a prompt goes to one engine, and its answer comes from another one.

Owns: which engines compute prompts, the first leg of a request, streams that move when an engine is drained.
Does not know: how pages move, how engines are started.
Whatever happens to the first leg, the second one computes what does not come.
"""

import asyncio
import logging
import secrets
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

from engine.config import Config
from engine.host.timeouts import is_set_within
from engine.types.errors import ConfigError
from server.extensions.handover.header import HandoverHeader
from server.extensions.handover.processes import LocalFleet
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.router import route
from server.http.exchange import EXCHANGE
from server.http.listener import bind, url_of
from server.keys import read_keys
from server.proxy.passage import Passage
from server.proxy.pieces import BodyPieces
from server.proxy.proxy import MORE_HEADERS, Delivery, Proxy, sent_on
from server.proxy.replica import Replica, State

log = logging.getLogger(__name__)

LEAST_BODY: Final = 256  # bytes; the prompt of a shorter one is computed as fast as its pages would come
LOOK_EVERY_S: Final = 0.1
LINGER_S: Final = 3.0  # of a drained engine, whose rows go on elsewhere with its pages
NO_WISH: Final = HandoverHeader().as_headers()  # also in place of a client's own header


class SplitReplicas(Replicas):
    """The engines of a split engine.  num_prefill: the first ones, which compute prompts."""

    num_prefill = 1

    @property
    def prefilling(self) -> list[Replica]:
        """The engines that compute prompts."""
        return self.all[: self.num_prefill]

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica:
        """The engine that answers a request; one that computes prompts if no other is left."""
        answering = [one for one in self.all[self.num_prefill :] if one.state is State.READY and one not in besides]
        return super().choose(blocks, [*besides, *self.prefilling] if answering else besides)

    def choose_prefilling(self) -> Replica | None:
        """Return the engine that computes the next prompt; None if none is ready."""
        ready = [one for one in self.prefilling if one.state is State.READY]
        return min(ready, key=lambda one: (one.num_open, one.num_sent), default=None)

    async def drain(self, replica: Replica) -> None:
        """Let the streams of an engine go on elsewhere, with its pages, and stop it."""
        if replica in self.prefilling or self.is_leaving:
            await super().drain(replica)
            return
        replica.state, replica.moves = State.DRAINING, True
        try:
            if replica.num_open:
                await is_set_within(LINGER_S, replica.idle)
                await asyncio.sleep(LINGER_S)
            await super().drain(replica)
        finally:
            replica.moves = False


class SplitProxy(Proxy):
    """Sends each prompt to an engine that computes it before another one answers."""

    async def send_on(
        self, request: web.Request, body: bytes, passage: Passage | None = None, blocks: list[bytes] | None = None
    ) -> web.StreamResponse:
        """Send a request on, as ``Proxy`` does, after its prompt has been computed."""
        declared = request[EXCHANGE].operation
        request[MORE_HEADERS] = NO_WISH
        if declared is not None and declared.generates and len(body) >= LEAST_BODY:
            request[MORE_HEADERS] = await self._prefilled(request, body)
        return await super().send_on(request, body, passage, blocks)

    async def go_on(self, delivery: Delivery, blocks: list[bytes]) -> web.StreamResponse:
        """Let another engine go on with a stream, with the pages of the one that is drained."""
        request = delivery.request
        replicas = self._replicas
        assert isinstance(replicas, SplitReplicas)
        last = next((one for one in replicas.all if one.name == request[EXCHANGE].replica and one.moves), None)
        request[MORE_HEADERS] = NO_WISH if last is None else HandoverHeader(peer=last.name, id=_new_id()).as_headers()
        return await super().go_on(delivery, blocks)

    async def _prefilled(self, request: web.Request, body: bytes) -> dict[str, str]:
        """Let an engine compute a prompt.  Return the headers by which another one finds its pages; none after a
        failure, of which the client learns nothing."""
        replicas = self._replicas
        assert isinstance(replicas, SplitReplicas)
        if (replica := replicas.choose_prefilling()) is None:
            return NO_WISH
        name = _new_id()
        asking = asyncio.ensure_future(self._ask_prefill(replica, request, body, name))
        try:
            with replica.busy():
                while not asking.done() and replica.state in (State.READY, State.DRAINING):
                    await asyncio.wait({asking}, timeout=LOOK_EVERY_S)
        finally:
            asking.cancel()
        if not asking.done() or asking.cancelled() or not asking.result():
            return NO_WISH
        return HandoverHeader(peer=replica.name, claim=name, id=name).as_headers()

    async def _ask_prefill(self, replica: Replica, request: web.Request, body: bytes, name: str) -> bool:
        """Return whether an engine has computed a prompt."""
        url = replica.url
        headers = sent_on(request.headers)
        headers.update(HandoverHeader(offer=name, id=name).as_headers())
        try:
            async with self._session.post(
                f"{url}{request.rel_url.raw_path_qs}", headers=headers, data=BodyPieces((body,)), allow_redirects=False
            ) as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            self._replicas.lose(replica, error, url)
            return False


def _new_id() -> str:
    return secrets.token_hex(8)


def serve_split(config: Config, num_prefill: int, num_decode: int) -> None:
    """Serve until stopped, as the router of engines of both kinds.  Raises ConfigError."""
    read_keys(config.server)
    if config.placement.ingress == "process":
        raise ConfigError("placement.ingress = 'process': an engine has its HTTP with it; use 'inline' here")

    class Split(SplitReplicas):
        """The engines of this command."""

    Split.num_prefill = num_prefill
    with bind(config.server.host, config.server.port) as listener:
        fleet = LocalFleet(config, num_prefill + num_decode)
        where = url_of(listener, config.server.scheme)
        print(f"router of {num_prefill} + {num_decode} engines at {where}; GET /replicas lists them", flush=True)
        uvloop.run(route(config, fleet, listener, Split, SplitProxy))
