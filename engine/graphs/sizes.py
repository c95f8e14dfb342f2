"""Which sizes graphs are captured for: few enough to capture at start, close enough that padding costs little.

Owns: the two schedules and rounding up to one.  Does not know: what is captured, devices.
"""

from bisect import bisect_left
from collections.abc import Sequence

# (up to, in steps of): small batches are common and small sizes are cheap to capture, so that is where they are dense.
TOKEN_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
TOKEN_STEP_BEYOND = 512
# A batch of 1 to 8 pays for every padded row; from there on a row costs less than the step it is padded to.
SMALL_BATCHES = (1, 2, 3, 4, 6, 8)
ROW_STEPS = ((64, 8), (256, 16), (512, 32))
ROW_STEP_BEYOND = 64


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Rows of a captured decode step, ascending; the last one is ``largest``."""
    return _capped([*SMALL_BATCHES, *_ladder(SMALL_BATCHES[-1], ROW_STEPS, ROW_STEP_BEYOND, largest)], largest)


def piecewise_sizes(largest: int) -> tuple[int, ...]:
    """Tokens of a captured step with prefill, ascending; the last one is ``largest``."""
    return _capped(_ladder(0, TOKEN_STEPS, TOKEN_STEP_BEYOND, largest), largest)


def round_up(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``count``; None past the largest."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def _ladder(start: int, steps: Sequence[tuple[int, int]], step_beyond: int, largest: int) -> list[int]:
    """Past ``start`` up to ``largest``, in the step of the range that each size lies in."""
    sizes: list[int] = []
    for last, step in (*steps, (largest, step_beyond)):
        sizes += range(start + step, min(last, largest) + 1, step)
        start = max(start, last)
    return sizes


def _capped(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Without those past ``largest``, and with it: every count up to it must have a size."""
    return (*(size for size in sizes if size < largest), largest)
