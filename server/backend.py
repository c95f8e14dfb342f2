"""What the HTTP layer asks of the engine: two protocols, small enough for a test to fake.

Owns: the calls and attributes that may be used.  Does not know: actors, or the messages between them.
Everything here is called on the event loop that also runs the engine's ingress.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.messages import ChatTurn, Delta, Stats
from engine.sampling.params import SamplingParams

Prompt = str | Sequence[int] | tuple[ChatTurn, ...]


class Stream(Protocol):
    """The output of one choice."""

    async def next(self) -> Delta:
        """All output since the last call; the last one has a finish and the usage.  Raises RequestError, EngineDied."""

    def close(self) -> None:
        """Cancel the request unless it has ended; idempotent."""


class Ingress(Protocol):
    """The engine's front door.

    ready: the model is loaded.  draining: set by the server when it is told to stop.
    failure: why the engine died, once it has.  stats: the scheduler's latest gauges.
    """

    ready: bool
    draining: bool
    failure: str | None
    stats: Stats | None

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""

    def open(
        self, prompt: Prompt, params: SamplingParams, *, echo: bool = False, priority: int = 0, cache_salt: str = ""
    ) -> Stream:
        """Accept a request or raise RequestError; never waits."""

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if the time ran out first."""

    def abort_all(self) -> None:
        """End every open request with an error."""
