"""All outputs of one generation, read as one stream.

Owns: the engine's streams of this generation, from opening to closing.  Does not know: HTTP, JSON.
Deltas of several choices come as they are produced.  The hand-over is bounded: while its reader waits for a slow
client, output stays in the engine's streams, where it merges.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType

from engine.messages import Delta, Finish
from server.backend import Stream
from server.clients.open_requests import ClientRequest
from server.generate.generation import Generation, choice_seed

Item = tuple[int, Delta]


class Choices:
    """An async context manager: streams are open inside of it and closed after it, however it ends."""

    def __init__(self, client: ClientRequest, generation: Generation) -> None:
        """Raises RequestError if the engine refuses one of the choices; then none is left open."""
        self._streams: list[Stream] = []
        try:
            for prompt in generation.prompts:
                for k in range(generation.num_choices):
                    params = generation.params
                    if k:
                        params = params.replace(seed=choice_seed(params.seed, k))
                    self._streams.append(client.open(prompt, params, generation.options))
        except BaseException:
            self._close_streams()
            raise
        self._num_running = len(self._streams)
        self._items: asyncio.Queue[Item | Exception] = asyncio.Queue(maxsize=len(self._streams))
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def num_choices(self) -> int:
        """How many choices there are, ended or not."""
        return len(self._streams)

    async def __aenter__(self) -> "Choices":
        if len(self._streams) > 1:
            self._pumps = [
                asyncio.create_task(self._pump(index, stream), name=f"choice-{index}")
                for index, stream in enumerate(self._streams)
            ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_streams()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def next(self) -> Item | None:
        """Returns (choice index, new output), or None when all have ended.  Raises what a choice failed with."""
        if self._num_running == 0:
            return None
        if self._pumps:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
        else:
            item = 0, await self._streams[0].next()
        if item[1].finish != Finish.RUNNING:
            self._num_running -= 1
        return item

    async def relay(self, sink: Callable[[int, Delta], bool], drained: Callable[[], Awaitable[None]]) -> None:
        """Give what is left to ``sink``, as (choice index, new output), in the moment it is produced.

        sink: returns whether it could take more now; if not, ``drained`` is waited for.  Raises as ``next`` does."""
        if not self._pumps:
            take = partial(sink, 0)
            while self._num_running:
                if await self._streams[0].relay(take):
                    self._num_running = 0
                else:
                    await drained()
        while (item := await self.next()) is not None:
            if not sink(*item):
                await drained()

    async def _pump(self, index: int, stream: Stream) -> None:
        try:
            delta = await stream.next()
            while delta.finish == Finish.RUNNING:
                await self._items.put((index, delta))
                delta = await stream.next()
            await self._items.put((index, delta))
        except Exception as error:  # raised again by next(), in the task that serves the client
            await self._items.put(error)

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()
