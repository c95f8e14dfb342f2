"""What every plugin on the scheduler's loop promises: it returns at once, and it does not keep more and more memory.

Owns: both limits.  Does not know: what is called, with what.
"""

import gc
import itertools
import math
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SLOW_S = 0.5  # far above what a busy machine adds; the engine already warns at a tenth of it
CALLS = 500
ROUNDS = 2  # all of which must grow: a cache that fills grows in some
KEPT_BYTES = 24  # per call: less than the smallest object and its place in a list
NOISE_BYTES = 4096
SETTLE_S = 0.2


def at_once(call: Callable[P, R], what: str) -> Callable[P, R]:
    """Return the call with a clock beside it: the second time that it is slow, it raises AssertionError.

    what: is called, for the error."""
    num_slow = 0

    @wraps(call)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal num_slow
        began = time.perf_counter()
        result = call(*args, **kwargs)
        took_s = time.perf_counter() - began
        num_slow += took_s > SLOW_S
        # The first time may be the machine's fault.
        assert took_s <= SLOW_S or num_slow < 2, f"{what} took {took_s:.2g} s, and every request waits for it"
        return result

    return timed


def with_clocks(plugin: R, *methods: str) -> R:
    """Return the object with a clock beside each of these methods that it has."""
    for name in methods:
        if hasattr(plugin, name):
            with suppress(AttributeError):  # of slots; then only the case has a limit
                setattr(plugin, name, at_once(getattr(plugin, name), name))
    return plugin


def watch_memory(call: Callable[[int], object], what: str, calls: int = CALLS) -> None:
    """Make many calls, each with another number, and again as many.  Raises AssertionError if memory grows with them.

    what: is called, for the error."""
    call = at_once(call, what)
    allowed = max(calls * KEPT_BYTES, NOISE_BYTES)
    numbers = itertools.count()
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    gc.freeze()  # what was there before need not be looked at again and again
    try:
        growths = []
        for _ in range(1 + ROUNDS):
            before = _in_use()
            for number in itertools.islice(numbers, calls):
                call(number)
            growths.append(_settled(before, allowed))
            if len(growths) > 1 and growths[-1] <= allowed:
                return  # what grew in other rounds was kept once
    finally:
        gc.unfreeze()
        if not traced:
            tracemalloc.stop()
    raise AssertionError(
        f"it leaks: {what} keeps {growths[-1] / calls:.0f} bytes for good each time, {calls} times in a row"
    )


def _settled(before: int, allowed: int) -> int:
    """By how much memory has grown, once threads have worked off what they were handed."""
    grown, earlier = _in_use() - before, math.inf
    while allowed < grown < 0.9 * earlier:
        time.sleep(SETTLE_S)
        grown, earlier = _in_use() - before, grown
    return grown


def _in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
