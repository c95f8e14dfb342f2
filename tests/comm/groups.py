"""Groups whose ranks are threads of the test, built all at once as real libraries want it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def at_once(size: int, work: Callable[[int], T]) -> list[T]:
    """``work(rank)`` of every rank, each on a thread of its own, in rank order; the first error is raised."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
