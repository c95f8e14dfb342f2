"""How long a test waits for what must come: long enough on any machine, however busy it is.

Most bounds in tests say that something happens at all.  They are far, and cost nothing as long as it does happen; how
soon it happens is for figures (``tests/figures.py``), which follow the machine's load as well.  What has to compare
durations with each other does so at several paces.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LEAST_S = 60.0
FACTOR = 10.0
PACES = (1.0, 3.0, 9.0)


def crowding() -> float:
    """How many processes want each core, by the last minute; 1 on a machine with nothing else to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def far(seconds: float) -> float:
    """A bound for what takes at most ``seconds`` on an idle machine."""
    return max(LEAST_S, FACTOR * seconds) * crowding()


def at_some_pace(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test whose argument ``pace`` multiplies all of its times: it holds if it does so at one of three paces.

    For what compares durations, such as "a header is cut at its deadline, and not before".  A process that does not run
    for a second spoils that where the deadline is half a second, and hardly where it is nine times as long; a product
    that is wrong is so at every pace.
    """
    signature = inspect.signature(test)

    @functools.wraps(test)
    def paced(**fixtures: Any) -> None:
        for pace in PACES:
            with as_far_as(pace):
                return test(**fixtures, pace=pace)

    @functools.wraps(test)
    async def paced_async(**fixtures: Any) -> None:
        for pace in PACES:
            with as_far_as(pace):
                return await test(**fixtures, pace=pace)

    chosen = paced_async if inspect.iscoroutinefunction(test) else paced
    kept = [one for name, one in signature.parameters.items() if name != "pace"]
    chosen.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return chosen


@contextmanager
def as_far_as(pace: float) -> Iterator[None]:
    """A test at a pace, whose failure counts at the last one."""
    try:
        yield
    except (AssertionError, OSError):  # a connection may be cut or a time be up
        if pace == PACES[-1]:
            raise


async def turns() -> None:
    """What is due on the loop is done: on a busy machine a short sleep may be over before it."""
    for _ in range(10):
        await asyncio.sleep(0)
