"""The link of the frontend's process: what is no message of it is refused, and what is too large is one's end."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.actors.snapshot import Gauges, MailboxGauges, RequestsFinished, Snapshot
from engine.config import Config
from engine.host.logs import LogSettings
from engine.kv.outline import Outline, OutlinedNode
from engine.messages import Abort, Delta, Deltas, Failed, Finish, StepDone, Stop, Tokenize
from engine.scheduling.board import Board, BoardRow, Pool
from engine.scheduling.meter import Meter, RequestMetrics, StepRecord
from engine.types.notices import EngineReady, Stats
from engine.types.params import SamplingParams
from engine.workers.link import LinkServer
from engine.workers.main import Outgoing
from engine.workers.messages import (
    Drain,
    FromFrontend,
    FromWorker,
    FrontendAssignment,
    FrontendProcessInbox,
    Handover,
    WorkerAlive,
)
from engine.workers.wire import Wire
from server.run.frontend_process import EngineLink
from tests.actors.test_ingress import Sent
from tests.pace import far

ALIVE, DRAIN = Wire("test").encode(WorkerAlive(waiting=1, peak=2)), Wire("test").encode(Drain())


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(far(5)):
        while not condition():
            await asyncio.sleep(0.001)


async def refused(tmp_path: Path, good: bytes, frame: bytes, accepts: Any) -> list[Any]:
    """What arrives on a link that accepts so much, of a frame between two good ones."""
    tmp_path.chmod(0o700)
    arrived: list[Any] = []
    server: LinkServer[Any] = LinkServer("frontend", f"unix:{tmp_path}", accepts, arrived.append, capacity=8)
    keys = server.client
    context = zmq.Context()
    bare = context.socket(zmq.PAIR)
    bare.curve_publickey, bare.curve_secretkey, bare.curve_serverkey = keys.own.public, keys.own.secret, keys.server
    bare.connect(server.endpoint)
    for sent in (good, frame, good):
        bare.send(sent)
    await wait_for(lambda: len(arrived) == 2)
    assert server.link.num_refused == 1
    context.destroy(linger=0)
    server.close()
    return arrived


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        ALIVE[:-1],
        ALIVE + b"\0",
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode(["GetSnapshot", "one"]),
        msgspec.msgpack.encode(["Tokenize", 1]),
        Wire("test").encode(StepDone(rank=0, step_id=1, token_ids=b"")),  # a message, but not one that a frontend says
        Wire("test").encode(Deltas(deltas=(Delta(request_id=1, text="x"),))),
        Wire("test").encode(Stop()),
    ],
    ids=["empty", "cut short", "too long by one", "tag", "type", "field", "executor's", "engine's", "stop"],
)
async def test_what_no_front_says_is_refused_by_name(
    tmp_path: Path, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await refused(tmp_path, ALIVE, frame, FromFrontend | FromWorker) == [WorkerAlive(waiting=1, peak=2)] * 2
    assert caplog.messages[0].startswith("link frontend: refused: ")


@pytest.mark.parametrize(
    "frame", [DRAIN + b"\0", ALIVE, msgspec.msgpack.encode(["Snapshot", 1, 1.0, {"num_open": -1.5}])]
)
async def test_what_no_engine_says_is_refused_by_name(
    tmp_path: Path, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert await refused(tmp_path, DRAIN, frame, FrontendProcessInbox) == [Drain()] * 2
    assert caplog.messages[0].startswith("link frontend: refused: ")


def test_all_that_the_engine_shows_survives_the_wire() -> None:
    meter = Meter(50.0)
    meter.queue_s.note(0.03)
    meter.completed(StepRecord(7, 50.0, 50.5, 3, 1, 40, num_next=3, num_first=1))
    one = RequestMetrics(1, Finish.LENGTH, 40, 10, 16, 0, 50.0, 0.03, None, 0.012, 1.5)
    meter.num_ended[one.finish] += 1
    gauges = Gauges(3, stalled_s=0.5, recovering=True, mailboxes=(MailboxGauges("scheduler", 1, 2, 3),))
    node = OutlinedNode(-1, 0, 2, 0, 1, 5, 3, 0, 0, False, b"\1\0\0\0")
    row = BoardRow(1, "prefill", 40, 16, 32, 2, 0, 0.03, None, 0.05)
    pool = Pool(9, 1, ((4, 0, -1), (5, 4, 0)), 3, ((3, 8),))
    handover = Handover(
        first_id=9,
        replay=(EngineReady(), Stats(step_id=3, running=1, waiting=0, pages_free=4, pages_cached=2, pages_used=2)),
        about=b"about",
        state=b"kept",
    )
    assignment = FrontendAssignment(
        config=Config(),
        capacity=99,
        heartbeat_s=0.25,
        logs=LogSettings(20, "text"),
        max_len=64,
        vocab_size=100,
        has_tokenizers=False,
        listener=5,
        handover=handover,
    )
    wire = Wire("frontend", accepts=FrontendProcessInbox)
    for message in (
        Snapshot(number=3, now=51.0, gauges=gauges, meter=meter, board=Board((row,), 1, pool, Outline((node,), False))),
        RequestsFinished(requests=(one,)),
        assignment,
    ):
        assert wire.decode(wire.encode(message)) == message


async def test_a_request_that_is_too_large_for_a_frame_ends_alone() -> None:
    sent, said = Sent(), Sent()
    wire = Wire("frontend", 200)

    def put(message: Any) -> None:
        wire.encode(message)
        Sent.put(sent, message)

    sent.put = put  # type: ignore[method-assign]
    outgoing = Outgoing(sent)  # type: ignore[arg-type]
    outgoing.link = sent  # type: ignore[assignment]
    link = EngineLink(outgoing)
    ingress = type("Ingress", (), {"inbox": said})()
    link.connect(ingress)
    link.put(Tokenize(request_id=1, params=SamplingParams(), text="x" * 300))
    link.put(Abort(request_id=2))
    assert not outgoing.failed.done(), "the process goes on"
    assert sent.messages == [Abort(request_id=2)]
    assert [(one.request_id, one.status, one.code) for one in said.messages if isinstance(one, Failed)] == [
        (1, 413, "request_too_large")
    ]


def test_what_the_front_works_with_needs_no_torch() -> None:
    code = "import sys, server.run.frontend_process\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
