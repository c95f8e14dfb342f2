"""Spans: tokens of a row's prompt that one step computes at once, so that no cut of the step may divide them.

Owns: how a step has them.  Does not know: why they belong together, how steps are cut.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

PART: Final = "spans"


class WholeSpan(NamedTuple):
    """The positions ``start:end`` of a row."""

    row: int
    start: int
    end: int


def part_of(spans: Iterable[WholeSpan]) -> dict[str, bytes]:
    """Return the parts of a step with these spans; none for no spans."""
    found = np.array([*spans], dtype=np.int32)
    return {PART: found.tobytes()} if len(found) else {}


def spans_of(parts: Mapping[str, bytes]) -> list[WholeSpan]:
    """Return the spans of a step with these parts."""
    found = np.frombuffer(parts.get(PART, b""), dtype=np.int32).reshape(-1, len(WholeSpan._fields))
    return [WholeSpan(*one) for one in found.tolist()]
