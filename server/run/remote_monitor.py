"""A monitor of an engine in another process: asks it, and waits for the answer, but not for long.

Owns: what has been asked and not been answered, and the observers of what the engine finishes.
Does not know: what the numbers mean, processes.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from msgspec import structs

from engine.actors.actor import Link
from engine.actors.ingress import RETRY_LATER_S, Ingress
from engine.actors.snapshot import GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.errors import RequestError
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers

MAX_ASKED = 64  # without an answer; more would only wait behind them


class RemoteMonitor:
    """A ``Monitor`` of another process.  ingress: this process's, for its own part.  decode: token ids as text."""

    def __init__(
        self, engine: Link[GetSnapshot | Subscribe], ingress: Ingress, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.decode = decode
        self._engine = engine
        self._ingress = ingress
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Snapshot]] = {}
        self._observers: Observers | None = None

    async def look(self, *, meter: bool = False, max_nodes: int = 0, patience_s: float = 1.0) -> Snapshot:
        """Returns what the engine's own monitor sees.  Raises RequestError: 503 if it does not answer in time."""
        if len(self._asked) >= MAX_ASKED:
            raise _silent()
        number = next(self._numbers)
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._engine.put(GetSnapshot(number, meter, max_nodes))
            async with asyncio.timeout(patience_s):
                snapshot = await answer
        except TimeoutError:
            raise _silent() from None
        finally:
            del self._asked[number]
        ingress = self._ingress
        gauges = structs.replace(
            snapshot.gauges,
            num_open=ingress.num_open,
            num_late_events=ingress.num_late_events,
            recovering=ingress.recovering,
        )
        return structs.replace(snapshot, gauges=gauges)

    def watch(self, observer: object, name: str) -> None:
        """Tell ``observer``, an object with observer hooks, which requests end from now on."""
        if self._observers is None:
            self._observers = Observers(Plugins({}, (), {}), {}, page_size=0)
            self._engine.put(Subscribe())
        self._observers.add(observer, name)

    def take(self, message: Snapshot | RequestsFinished) -> None:
        """Take a message of the engine."""
        if isinstance(message, RequestsFinished):
            if self._observers is not None:
                self._observers.request_finished(message.requests)
        elif (answer := self._asked.get(message.number)) is not None and not answer.done():
            answer.set_result(message)


def _silent() -> RequestError:
    return RequestError("the engine does not answer", status=503, code="engine_silent", retry_after_s=RETRY_LATER_S)
