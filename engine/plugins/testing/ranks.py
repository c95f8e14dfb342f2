"""What holds for every ranking plugin, eviction strategy or scheduling policy: ranks are tuples of equally many ints.

Owns: that check.  Does not know: what is ranked.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from engine.plugins.testing.promises import at_once

T = TypeVar("T")


def check_ranks(rank: Callable[[T], object], ranked: Sequence[T]) -> None:
    """Raise AssertionError unless ranks are tuples of ints, of one length, and the same when asked again.

    ranked: frozen dataclasses, so that a plugin that changes what it looks at is caught as well."""
    rank = at_once(rank, "rank")
    length: int | None = None
    first: list[object] = []
    for one in ranked:
        made: Any = rank(one)
        shown = f"rank({_fields(one)}) is {made!r}"
        assert isinstance(made, tuple), f"{shown}; it must be a tuple"
        assert all(type(part) is int for part in made), f"{shown}; only ints have one order for all"
        assert length is None or len(made) == length, f"{shown}; others have {length} parts"
        length = len(made)
        first.append(made)
    for one, made in zip(ranked, first, strict=True):
        again = rank(one)
        assert again == made, f"rank({_fields(one)}) was {made!r} and is {again!r} when asked again"


def _fields(one: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(one).items())
