"""Places for work on pictures: clients take them in turn, and none takes all of them.

Owns: how many there are, whose turn is next, how long a request waits.  Does not know: what the work is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from engine.types.errors import RequestError
from server.extensions.storage.pace import Turns

WAIT_S: Final = 20.0
RETRY_AFTER_S: Final = 5


class Places:
    """A number of places.  of_one: so many of them a client may have at once."""

    def __init__(self, num_places: int, of_one: int) -> None:
        self._free = asyncio.Semaphore(num_places)
        self._of_one = of_one
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._turns = Turns()

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and have it within the context.  Raises RequestError (503) where none comes."""
        own = self._own.setdefault(client, asyncio.Semaphore(self._of_one))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_S):
                    await held.enter_async_context(own)
                    async with self._turns.of(client):
                        await held.enter_async_context(self._free)
            except TimeoutError:
                raise RequestError(
                    f"a picture has waited {WAIT_S:g} s for others to be read; send fewer at once",
                    status=503,
                    code="pictures_busy",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            yield
