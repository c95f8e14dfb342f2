"""Work that no connection waits for: it is tried again for as long as it is only the engine that has no room or time.

Owns: which refusals are none of the work's.  Does not know: where the work is stored, what it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from engine.actors.admission import RETRY_AFTER_S
from engine.errors import EngineDied, RequestError

T = TypeVar("T")
ENDED_WITH_THE_ENGINE = frozenset({"engine_died", "shutting_down"})


async def until_taken(attempt: Callable[[], Awaitable[T]]) -> T:
    """Returns what an attempt gives in the end.  Raises RequestError for what no later attempt could change.

    Where the engine ends, so does this process, or it gets another engine: the work waits for the one or the other."""
    while True:
        delay_s = RETRY_AFTER_S
        try:
            return await attempt()
        except EngineDied:
            pass
        except RequestError as error:
            if error.retry_after_s is None and error.code not in ENDED_WITH_THE_ENGINE:
                raise
            delay_s = error.retry_after_s or delay_s
        await asyncio.sleep(delay_s)
