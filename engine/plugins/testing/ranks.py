"""The check for every ranking plugin, eviction strategy or scheduling policy: ranks are tuples of equally many ints.

Owns: this check.  Does not know: the ranked objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from engine.plugins.testing.promises import at_once

T = TypeVar("T")


def check_ranks(rank: Callable[[T], object], ranked: Sequence[T]) -> None:
    """Raise AssertionError unless ranks are tuples of ints, of one length, and the same in a second call.

    ranked: frozen dataclasses, so that a plugin that modifies its argument is detected as well."""
    rank = at_once(rank, "rank")
    length: int | None = None
    first: list[object] = []
    for one in ranked:
        made: Any = rank(one)
        shown = f"rank({_fields(one)}) is {made!r}"
        assert isinstance(made, tuple), f"{shown}; it must be a tuple"
        assert all(type(part) is int for part in made), f"{shown}; only ints have a total order"
        assert length is None or len(made) == length, f"{shown}; others have {length} parts"
        length = len(made)
        first.append(made)
    for one, made in zip(ranked, first, strict=True):
        again = rank(one)
        assert again == made, f"rank({_fields(one)}) was {made!r} and is {again!r} in a second call"


def _fields(one: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(one).items())
