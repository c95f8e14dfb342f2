"""Timeouts for calls: slow ones are logged, and those that may be abandoned are.

Owns: the threads for this.  Does not know: what is called, and why.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

SAY_AFTER_S = 5.0  # the interval doubles after each line


@contextmanager
def named_while_slow(what: str) -> Iterator[None]:
    """Log that the block takes long, for as long as it runs.  what: its name in the log."""
    over = threading.Event()

    def watch() -> None:
        after_s = SAY_AFTER_S
        waited_s = 0.0
        while not over.wait(after_s - waited_s):
            log.warning("%s has taken %g s so far", what, after_s)
            waited_s, after_s = after_s, 2 * after_s

    threading.Thread(target=watch, name=f"watch of {what}", daemon=True).start()
    try:
        yield
    finally:
        over.set()


async def is_set_within(timeout_s: float, event: asyncio.Event) -> bool:
    """Wait for an event; return False on a timeout."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


def returns_within(timeout_s: float, work: Callable[[], object], name: str) -> bool:
    """Call ``work`` on a thread with this name; if it does not return in time, the thread is left running.

    Returns whether it has returned.  Raises what it raised, SystemExit as well."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    for error in raised:
        raise error
    return not thread.is_alive()
