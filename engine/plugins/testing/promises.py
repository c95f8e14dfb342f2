"""Guarantees of every plugin on the scheduler's loop: it returns at once, and its memory does not grow.

Owns: both limits.  Does not know: the calls.
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

SLOW_S = 0.5  # far more than a busy machine adds; the engine warns at a tenth of it
CALLS = 500
ROUNDS = 2  # a leak grows in all rounds, a cache that fills only in some
KEPT_BYTES = 24  # per call: less than the smallest object and its place in a list
NOISE_BYTES = 4096
SETTLE_S = 0.2


def at_once(call: Callable[P, R], what: str) -> Callable[P, R]:
    """Return the call with a timer: the second time that it is slow, it raises AssertionError.

    what: its name in the error."""
    num_slow = 0

    @wraps(call)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal num_slow
        began = time.perf_counter()
        result = call(*args, **kwargs)
        took_s = time.perf_counter() - began
        num_slow += took_s > SLOW_S
        # The machine may have caused the first time.
        assert took_s <= SLOW_S or num_slow < 2, f"{what} took {took_s:.2g} s, and every request waits for it"
        return result

    return timed


def with_clocks(plugin: R, *methods: str) -> R:
    """Return the object with a timer on each of these methods that it has."""
    for name in methods:
        if hasattr(plugin, name):
            with suppress(AttributeError):  # raised for slots; then only the case has a limit
                setattr(plugin, name, at_once(getattr(plugin, name), name))
    return plugin


def watch_memory(call: Callable[[int], object], what: str, calls: int = CALLS) -> None:
    """Make many calls, each with another number, and repeat.  Raises AssertionError if memory grows in every round.

    what: the call's name in the error."""
    call = at_once(call, what)
    allowed = max(calls * KEPT_BYTES, NOISE_BYTES)
    numbers = itertools.count()
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    gc.freeze()  # existing objects need not be scanned repeatedly
    try:
        growths = []
        for _ in range(1 + ROUNDS):
            before = _in_use()
            for number in itertools.islice(numbers, calls):
                call(number)
            growths.append(_settled(before, allowed))
            if len(growths) > 1 and growths[-1] <= allowed:
                return  # growth in other rounds was kept once
    finally:
        gc.unfreeze()
        if not traced:
            tracemalloc.stop()
    raise AssertionError(f"it leaks: {what} keeps {growths[-1] / calls:.0f} bytes each time, {calls} times in a row")


def _settled(before: int, allowed: int) -> int:
    """Return the growth of memory after threads have finished their queued work."""
    grown, earlier = _in_use() - before, math.inf
    while allowed < grown < 0.9 * earlier:
        time.sleep(SETTLE_S)
        grown, earlier = _in_use() - before, grown
    return grown


def _in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
