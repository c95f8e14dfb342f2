"""The slots of snapshots, of which each is free, or some row's, or a node's.

Owns: their number, the free ones.  Does not know: which row or node has a slot.
"""

from collections.abc import Iterable
from typing import Final

PAGES_PER_SLOT: Final = 64


def num_snapshots(num_pages: int, max_running: int) -> int:
    """Return the number of slots next to a pool of so many pages: one for each row's last copy, the rest for nodes.

    A row has two while the newer one's step is in flight, and may take a node's for it."""
    return max_running + num_pages // PAGES_PER_SLOT


class SnapshotSlots:
    """The slots from ``first`` on, ``num_slots`` of them."""

    def __init__(self, first: int, num_slots: int) -> None:
        self._all = range(first, first + num_slots)
        self._free = [*reversed(self._all)]

    @property
    def num_held(self) -> int:
        """Number of slots that are not free."""
        return len(self._all) - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def free(self, slot: int) -> None:
        """Give a slot back.  Steps run in order, so a step in flight may still read or write it."""
        assert slot in self._all, f"slot {slot} is no snapshot's"
        assert slot not in self._free, f"slot {slot} is freed twice"
        self._free.append(slot)

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is free or held once."""
        slots = sorted([*held, *self._free])
        assert slots == [*self._all], f"slots {slots} are free or held, and there are {self._all}"
