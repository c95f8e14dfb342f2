"""A search for a short failing scenario: operations are left out while it still fails the same way.

Owns: the search (ddmin, Zeller and Hildebrandt 2002).  Does not know: what an operation is, how it is run.
"""

import time
from collections.abc import Callable


def shrink(
    ops: list[int], orders: list[int], fails: Callable[[list[int], int], bool], limit_s: float = 60.0
) -> tuple[list[int], int]:
    """Return the fewest of ``ops`` found within ``limit_s`` for which ``fails(ops, order)``, and the order.

    Each candidate is tried with a few orders: leaving something out moves what is left."""
    ends_at = time.monotonic() + limit_s
    order = orders[0]

    def order_of_failure(candidate: list[int]) -> int | None:
        for one in dict.fromkeys((order, *orders)):
            if time.monotonic() < ends_at and fails(candidate, one):
                return one
        return None

    num_parts = 2
    while len(ops) > 1 and time.monotonic() < ends_at:
        size = -(-len(ops) // num_parts)
        for start in range(0, len(ops), size):
            candidate = ops[:start] + ops[start + size :]
            found = order_of_failure(candidate) if candidate else None
            if found is not None:
                ops, order = candidate, found
                num_parts = max(num_parts - 1, 2)
                break
        else:
            if size == 1:
                break
            num_parts = min(num_parts * 2, len(ops))
    return ops, order
