"""The inside of the frontend's process, in this one: it goes on where another was, and does what its engine says."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.actors.ingress import Ingress
from engine.actors.snapshot import Gauges, GetSnapshot, Snapshot
from engine.config import Config, build_config
from engine.host.logs import LogSettings
from engine.messages import Delta, Deltas, Finish, Stop, Tokenize, Usage
from engine.types.notices import EngineReady, EngineRecovering
from engine.workers.child import Ticket
from engine.workers.keys import ClientKeys, KeyPair
from engine.workers.main import Outgoing
from engine.workers.messages import Drain, EngineFailed, FrontendAssignment, FrontendDrained, Handover, WorkerReady
from server.http.listener import bind
from server.run.frontend_process import FrontendProcess
from tests.actors.test_ingress import Sent
from tests.pace import far
from tests.server.http_client import as_operator
from tests.server.live_server import CARD, MODEL

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
HANDOVER = Handover(first_id=9, replay=(EngineReady(),), about=msgspec.msgpack.encode(CARD))
COMPLETION = {"model": MODEL, "prompt": "p"}


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    """A frontend freezes what has been loaded for as long as its process lives, which is not this one's business."""
    yield
    gc.unfreeze()


class Stage:
    """A frontend without a link.  sent: what it has said."""

    async def begin(self, handover: Handover) -> None:
        headers = as_operator()  # skips before anything listens
        self.sent = Sent()
        pair = KeyPair(b"", b"")
        self.frontend = FrontendProcess(Ticket(0, "frontend", "inproc://nowhere", ClientKeys(pair, b"")))
        listener = bind("127.0.0.1", 0)
        self.url = "http://{}:{}".format(*listener.getsockname())
        config = build_config(Config(), {"model": {"path": str(DEMO)}})
        assignment = FrontendAssignment(
            config=config,
            capacity=100,
            heartbeat_s=1.0,
            logs=LogSettings(20, "text"),
            max_len=1024,
            vocab_size=1000,
            has_tokenizers=False,
            listener=listener.detach(),
            handover=handover,
        )
        self.ingress: Ingress = await self.frontend.build(assignment, Outgoing(self.sent))  # type: ignore[arg-type]
        self.running = asyncio.ensure_future(self.ingress.run())
        self.session = aiohttp.ClientSession(headers=headers)
        await asyncio.sleep(0)

    def tell(self, message: Any) -> None:
        """Deliver a message as the engine does."""
        self.frontend.deliver(self.ingress, message)

    async def said(self, kind: type) -> Any:
        """Wait until it has said so; returns the last of its kind."""
        async with asyncio.timeout(far(5)):
            while not (found := [one for one in self.sent.messages if isinstance(one, kind)]):
                await asyncio.sleep(0.001)
        return found[-1]

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, json=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def on_stage(handover: Handover = HANDOVER) -> AsyncIterator[Stage]:
    """A stage with a frontend that ends as its engine would end it."""
    stage = Stage()
    await stage.begin(handover)
    assert stage.sent.messages == [WorkerReady()]
    yield stage
    await stage.session.close()
    stage.tell(Stop())
    await asyncio.wait_for(stage.running, far(5))
    address = stage.url.removeprefix("http://").split(":")
    with socket.socket() as late:
        assert late.connect_ex((address[0], int(address[1]))) != 0, "something still listens"


async def test_ids_go_on_where_another_fronts_ended_and_clients_who_waited_are_served() -> None:
    async with on_stage() as stage:
        asking = asyncio.ensure_future(stage.ask("POST", "/v1/completions", COMPLETION))
        request = await stage.said(Tokenize)
        assert (request.request_id, request.text) == (9, "p")
        stage.tell(Deltas(deltas=(Delta(request_id=8, text="of another frontend's"),)))
        stage.tell(
            Deltas(
                deltas=(
                    Delta(
                        request_id=9,
                        text="answer",
                        finish=Finish.STOP,
                        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
                    ),
                )
            )
        )
        status, answer = await asking
        assert (status, answer["choices"][0]["text"]) == (200, "answer")
        assert stage.ingress.num_late_events == 1


async def test_a_front_that_comes_while_the_engine_recovers_or_loads_says_so() -> None:
    async with on_stage(
        Handover(first_id=1, replay=(EngineReady(), EngineRecovering(reason="why")), about=msgspec.msgpack.encode(CARD))
    ) as stage:
        answering = asyncio.ensure_future(stage.ask("GET", "/ready"))
        ask = await stage.said(GetSnapshot)
        stage.tell(Snapshot(number=ask.number, now=1.0, gauges=Gauges()))
        assert (await answering)[1]["error"]["code"] == "recovering"
    async with on_stage(Handover(first_id=1, replay=(), about=msgspec.msgpack.encode(CARD))) as stage:
        assert (await stage.ask("GET", "/ready"))[1]["error"]["code"] == "not_ready"


async def test_it_drains_when_it_is_told_to_and_says_so() -> None:
    async with on_stage() as stage:
        asking = asyncio.ensure_future(stage.ask("POST", "/v1/completions", COMPLETION))
        await stage.said(Tokenize)
        stage.tell(Drain())
        assert await stage.said(FrontendDrained)
        status, refused = await stage.ask("POST", "/v1/completions", COMPLETION)
        assert (status, refused["error"]["code"]) == (503, "draining")
        stage.tell(
            Deltas(
                deltas=(
                    Delta(
                        request_id=9,
                        text="answer",
                        finish=Finish.STOP,
                        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
                    ),
                )
            )
        )
        assert (await asking)[0] == 200


async def test_a_dead_engine_ends_what_is_open() -> None:
    async with on_stage() as stage:
        asking = asyncio.ensure_future(stage.ask("POST", "/v1/completions", COMPLETION))
        await stage.said(Tokenize)
        stage.tell(EngineFailed(reason="scheduler crashed in /secret/path.py"))
        status, answer = await asking
        assert (status, answer["error"]["code"], "secret" in str(answer)) == (500, "engine_died", False)
