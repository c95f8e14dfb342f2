"""Two ends of a link, and the loops to run them on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvloop
import zmq

from engine.messages import Step, StepDone, Stop
from engine.workers.keys import Authenticator, ClientKeys, KeyPair
from engine.workers.link import SocketLink
from engine.workers.messages import FromWorker
from engine.workers.socket_directory import SocketDirectory
from tests.pace import far


class Pair:
    """The engine's end of an executor's link, and a bare socket that has the right keys and may say anything."""

    def __init__(self, base: Path, max_frame_bytes: int = 1 << 16, capacity: int = 8) -> None:
        self.context = zmq.Context()
        self.messages: list[Any] = []
        self.directory = SocketDirectory(base)
        self.link: SocketLink[StepDone | FromWorker] = SocketLink(
            "executor0",
            self.context,
            StepDone | FromWorker,
            self.messages.append,
            capacity=capacity,
            max_frame_bytes=max_frame_bytes,
        )
        ours, theirs = KeyPair.draw(), KeyPair.draw()
        self.keys = ClientKeys(theirs, ours.public)
        self.authenticator = Authenticator(self.context)
        self.authenticator.admit("executor0", frozenset((theirs.public,)))
        self.endpoint = self.link.bind(self.directory.endpoint("executor0"), ours)
        self.bare = self.context.socket(zmq.PAIR)
        self.bare.linger = 0
        self.bare.curve_publickey, self.bare.curve_secretkey = theirs.public, theirs.secret
        self.bare.curve_serverkey = ours.public

    def connect(self, accepts: Any = Step | Stop) -> tuple[SocketLink[Any], list[Any]]:
        """A real other end."""
        arrived: list[Any] = []
        other: SocketLink[Any] = SocketLink("engine", self.context, accepts, arrived.append, capacity=8)
        other.connect(self.endpoint, self.keys)
        return other, arrived

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until it holds."""
        async with asyncio.timeout(far(5)):
            while not condition():
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.bare.close()
        self.link.close()
        self.authenticator.close()
        self.directory.remove()
        self.context.destroy(linger=0)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """A test with a pair runs on either kind of loop."""
    if "pair" not in item.fixturenames:  # type: ignore[attr-defined]
        return None
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets, whose paths must be shorter than pytest's may be."""
    with TemporaryDirectory(prefix="sockets") as path:
        yield Path(path)


@pytest.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    pair = Pair(folder)
    yield pair
    pair.close()
