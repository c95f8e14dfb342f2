"""The link of a tokenizer process: what is no message of it is refused by name, and what is too large is cut."""

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

from engine.messages import Abort, Admit, Delta, Deltas, Failed, StepDone, Stop, Tokenize
from engine.types.params import SamplingParams
from engine.workers.keys import KeyPair
from engine.workers.link import LinkServer
from engine.workers.main import Outgoing
from engine.workers.messages import FromTokenizer, FromWorker, WorkerAlive
from engine.workers.tokenizer_main import TextLink
from engine.workers.wire import Wire
from tests.pace import far

GOOD = Wire("test").encode(WorkerAlive(waiting=1, peak=2))


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(far(5)):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\0",
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode(["Admit", "one", b"", {}]),
        msgspec.msgpack.encode(["Deltas", [["Delta"]]]),
        Wire("test").encode(StepDone(rank=0, step_id=1, token_ids=b"")),  # a message, but not one that a tokenizer says
        Wire("test").encode(Tokenize(request_id=1, params=SamplingParams(), text="x")),
        Wire("test").encode(Stop()),
    ],
    ids=["empty", "cut short", "too long by one", "tag", "type", "field", "executor's", "request", "stop"],
)
async def test_what_no_tokenizer_says_is_refused_by_name(
    folder: Path, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    arrived: list[Any] = []
    with caplog.at_level(logging.WARNING):
        server = LinkServer("tokenizer0", f"unix:{folder}", FromTokenizer | FromWorker, arrived.append, capacity=8)
        keys = server.client
        context = zmq.Context()
        bare = context.socket(zmq.PAIR)
        bare.curve_publickey, bare.curve_secretkey, bare.curve_serverkey = keys.own.public, keys.own.secret, keys.server
        bare.connect(server.endpoint)
        for sent in (GOOD, frame, GOOD):
            bare.send(sent)
        await wait_for(lambda: len(arrived) == 2)
        assert server.link.num_refused == 1
        context.destroy(linger=0)
        server.close()
    assert arrived == [WorkerAlive(waiting=1, peak=2)] * 2
    assert caplog.messages[0].startswith("link tokenizer0: refused: ")
    assert list(folder.iterdir()) == []


async def test_a_stranger_gets_no_tokenizers_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrived: list[Any] = []
    with caplog.at_level(logging.WARNING):
        server = LinkServer("tokenizer0", f"unix:{folder}", FromTokenizer | FromWorker, arrived.append, capacity=8)
        keys = server.client
        context = zmq.Context()
        stranger = KeyPair.draw()
        bare = context.socket(zmq.PAIR)
        bare.curve_publickey, bare.curve_secretkey, bare.curve_serverkey = stranger.public, stranger.secret, keys.server
        bare.connect(server.endpoint)
        bare.send(GOOD)
        await wait_for(lambda: bool(caplog.messages))
        context.destroy(linger=0)
        server.close()
    assert caplog.messages[0] == "link tokenizer0: a client without a known key was refused"
    assert arrived == []


def test_what_a_tokenizer_works_with_needs_no_torch() -> None:
    """Not only when it is imported: with a chat, and a grammar compiled."""
    code = (
        "import sys\n"
        "from engine.config import Config, build_config\n"
        "from engine.messages import ChatTurn\n"
        "from engine.checkpoints.checkpoint import resolve_checkpoint\n"
        "from engine.workers.tokenizer_main import load_text\n"
        "from engine.types.params import Grammar\n"
        "config = build_config(Config(), {'model': {'path': str(resolve_checkpoint('demo', ''))}})\n"
        "_, codec, forms = load_text(config)\n"
        "codec.encode_chat((ChatTurn('user', 'x'),))\n"
        "forms.grammars.check(Grammar('json_object'))\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


class Small:
    """A link that takes little at once."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._wire = Wire("tokenizer0", 250)

    def put(self, message: Any) -> None:
        self._wire.encode(message)
        self.sent.append(message)


async def test_what_is_too_large_is_cut_and_what_cannot_be_is_one_requests_end() -> None:
    small = Small()
    outgoing = Outgoing(small)  # type: ignore[arg-type]
    link = TextLink(outgoing)
    link.put(Deltas(deltas=tuple(Delta(request_id=one, text="x" * (300 if one == 2 else 50)) for one in range(1, 6))))
    link.put(Admit(request_id=7, token_ids=bytes(400), params=SamplingParams()))
    assert not outgoing.failed.done(), "the process goes on"
    whole = [delta.request_id for message in small.sent if isinstance(message, Deltas) for delta in message.deltas]
    assert whole == [1, 3, 4, 5]
    assert Abort(request_id=2) in small.sent
    failures = {one.request_id: (one.status, one.code) for one in small.sent if isinstance(one, Failed)}
    assert failures == {2: (413, "output_too_large"), 7: (413, "request_too_large")}
