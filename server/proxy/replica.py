"""A server that requests are sent on to: where it is, whether it takes requests, how busy it is.

Owns: its state, and what a proxy needs of all there are.  Does not know: how one is started, which one is chosen.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from engine.types.errors import RequestError

CHECK_TIMEOUT_S = 5.0
RETRY_AFTER_S = 1


def unavailable(message: str, code: str = "no_replica") -> RequestError:
    """A 503 after which the client may try again."""
    return RequestError(message, status=503, code=code, retry_after_s=RETRY_AFTER_S)


class State(Enum):
    """STARTING: not ready yet, or not again.  DRAINING: it finishes its requests, then it is stopped."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass
class Replica:
    """One replica.  num_open: requests that it was sent and that have not ended.  num_lost: how often it was lost.

    open_blocks: of the prompts of those.  num_starts: how often it was started again after a stop.
    settled: it is ready, or cannot be started any more.  moves: its streams go on elsewhere now."""

    name: str
    url: str = ""
    state: State = State.STARTING
    num_open: int = 0
    open_blocks: int = 0
    num_sent: int = 0
    num_lost: int = 0
    num_starts: int = 0
    moves: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def busy(self, num_blocks: int = 0) -> Iterator[None]:
        """Count a request as open for as long as the context lasts.  num_blocks: of its prompt."""
        self.num_open += 1
        self.open_blocks += num_blocks
        self.num_sent += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            self.open_blocks -= num_blocks
            if not self.num_open:
                self.idle.set()


class Group(Protocol):
    """All there are of something that requests can be sent to.  noun: what one of them is called."""

    noun: str

    @property
    def all(self) -> Sequence[Replica]: ...

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        """Send it no request until it is known to answer again.  url: where it did not."""


class Choice(Protocol):
    """A chooser of where a request goes.  num_resumed: streams that went on elsewhere.  is_leaving: all of them end."""

    num_resumed: int

    @property
    def is_leaving(self) -> bool: ...

    def choose(self, blocks: list[bytes], besides: list[Replica]) -> Replica:
        """Returns where a request goes.  besides: those that were tried.  Raises RequestError: 503."""

    def lose(self, replica: Replica, reason: object, url: str = "") -> None:
        """Send it no request until it is known to answer again.  url: where it did not."""
