"""Work that no connection waits for: it is tried again for as long as it is only the engine that has no room or time.

Owns: which refusals are none of the work's, whose limits it has, and that it comes last.
Does not know: where the work is stored, what it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import structs

from engine.actors.admission import RETRY_AFTER_S
from engine.messages import RequestOptions
from engine.types.errors import EngineDied, RequestError
from server.generate.generation import Generation, ResumePoint

T = TypeVar("T")
LAST_PRIORITY = (1 << 31) - 1
ACCOUNT = "{client} (batch)"  # whose limits the work has: not those of its client's live requests
MOST_ACTIVE = 100  # batches of an owner that have not ended, and as many responses
ENDED_WITH_THE_ENGINE = frozenset({"engine_died", "shutting_down"})


def unhurried(origin: ResumePoint, generation: Generation) -> Generation:
    """Returns a generation that comes after all live ones.  origin: what it is named and drawn by."""

    def last(options: RequestOptions) -> RequestOptions:
        return structs.replace(options, priority=LAST_PRIORITY)

    return structs.replace(
        generation,
        origin=origin,
        options=last(generation.options),
        of_prompts=tuple((params, last(options)) for params, options in generation.of_prompts),
    )


def check_active(what: str, num_active: int) -> None:
    """Raise RequestError (429) if an owner may begin no more.  num_active: of its ``what`` that have not ended."""
    if num_active >= MOST_ACTIVE:
        reason = f"{num_active} of your {what} have not ended, at most {MOST_ACTIVE} are taken"
        raise RequestError(reason, status=429, code=f"too_many_{what}", retry_after_s=60)


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
