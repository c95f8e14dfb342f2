"""What every plugin on the scheduler's loop promises: it returns at once, and it does not keep more and more memory.

Owns: both limits.  Does not know: what is called, with what.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SLOW_S = 0.5  # far above what a busy machine adds; the engine already warns at a tenth of it
CALLS = 2000
KEPT_BYTES = 16  # per call: half of the smallest object
SETTLE_S = 0.2


def at_once(call: Callable[P, R]) -> Callable[P, R]:
    """Return the call with a clock beside it: the second time that it is slow, it raises AssertionError."""
    num_slow = 0

    @wraps(call)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal num_slow
        began = time.perf_counter()
        result = call(*args, **kwargs)
        took_s = time.perf_counter() - began
        num_slow += took_s > SLOW_S
        # The first time may be the machine's fault.
        assert took_s <= SLOW_S or num_slow < 2, f"{_name(call)} took {took_s:.2g} s, and every request waits for it"
        return result

    return timed


def check_memory(call: Callable[[int], object], what: str) -> None:
    """Make many calls, each with another number, and again as many.  Raises AssertionError if memory grows with them.

    what: is called, for the error."""
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    try:
        for number in range(CALLS):
            call(number)
        before = _in_use()
        for number in range(CALLS, 2 * CALLS):
            call(number)
        grown, earlier = _in_use() - before, 0
        while grown > CALLS * KEPT_BYTES and grown != earlier:  # a thread may still work off what it was handed
            time.sleep(SETTLE_S)
            grown, earlier = _in_use() - before, grown
    finally:
        if not traced:
            tracemalloc.stop()
    assert grown <= CALLS * KEPT_BYTES, (
        f"it leaks: {what} keeps {grown / CALLS:.0f} bytes for good each time, {CALLS} times in a row"
    )


def _in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _name(call: Callable[..., object]) -> str:
    return str(getattr(call, "__name__", call))
