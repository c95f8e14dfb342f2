"""The slots of snapshots, of which each is free, or some row's, or a node's; and the copies between slots.

Owns: their number, the free ones, the copies before the next step.  Does not know: which row or node has a slot.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from engine.config import Config
from engine.plugins.kinds import PROPOSER, chosen_plugins

PAGES_PER_SLOT: Final = 64

Copy = tuple[int, int]
"""The slot that is copied, and the one that it is copied to."""


def num_for_rows(config: Config) -> int:
    """Return the number of slots that rows may need: one for each one's last copy, and with a proposer one for the
    state that is set aside.

    A row has one more while the newer copy's step is in flight, and may take a node's for it."""
    return config.scheduler.max_running * (1 + (PROPOSER in chosen_plugins(config)))


def num_snapshots(num_pages: int, num_for_rows: int) -> int:
    """Return the number of slots next to a pool of so many pages: those for rows, the rest for nodes."""
    return num_for_rows + num_pages // PAGES_PER_SLOT


def num_on_host(num_host_pages: int) -> int:
    """Return the number of slots in host memory next to so many host pages."""
    return -(-num_host_pages // PAGES_PER_SLOT)


class SnapshotSlots:
    """The slots from ``first`` on: ``num_slots`` on the device, and then ``num_host`` in host memory.

    num_on_device, num_host: how many there are.
    copies: those before the next step, one after the other.  A slot that is freed may be a later one's target."""

    def __init__(self, first: int, num_slots: int, num_host: int = 0) -> None:
        self.num_host = num_host
        self.copies: list[Copy] = []
        self.num_on_device = num_slots
        self._under_way: deque[list[Copy]] = deque()
        self._all = range(first, first + num_slots + num_host)
        self._first_on_host = first + num_slots
        self._free = dict.fromkeys(range(self._first_on_host - 1, first - 1, -1))
        self._free_on_host = dict.fromkeys(range(self._all.stop - 1, self._first_on_host - 1, -1))

    @property
    def num_held(self) -> int:
        """Number of slots that are not free."""
        return len(self._all) - len(self._free) - len(self._free_on_host)

    @property
    def num_free(self) -> int:
        """Number of free slots on the device."""
        return len(self._free)

    @property
    def num_held_on_host(self) -> int:
        """Number of slots in host memory that are not free."""
        return self.num_host - len(self._free_on_host)

    def send(self) -> list[Copy]:
        """Return the copies for the next step, and forget them when it has ``arrived``."""
        copies, self.copies = self.copies, []
        if copies:
            self._under_way.append(copies)
        return copies

    def arrived(self) -> None:
        """Note that the first step with copies has completed."""
        self._under_way.popleft()

    def is_awaited(self, slot: int) -> bool:
        """Return whether a step that has not completed copies to a slot before its batch."""
        return any(slot == target for copies in (self.copies, *self._under_way) for _, target in copies)

    def reset(self) -> None:
        """Forget all copies: the executors are gone."""
        self.copies.clear()
        self._under_way.clear()

    def is_on_host(self, slot: int) -> bool:
        """Return whether a slot is in host memory."""
        return slot >= self._first_on_host

    def take(self, *, on_host: bool = False) -> int | None:
        """Take a free slot; None if there is none."""
        free = self._free_on_host if on_host else self._free
        return free.popitem()[0] if free else None

    def free(self, slot: int) -> None:
        """Give a slot back.  Steps run in order, so a step in flight may still read or write it."""
        free = self._free_on_host if self.is_on_host(slot) else self._free
        assert slot in self._all, f"slot {slot} is no snapshot's"
        assert slot not in free, f"slot {slot} is freed twice"
        free[slot] = None

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is free or held once."""
        slots = sorted([*held, *self._free, *self._free_on_host])
        assert slots == [*self._all], f"slots {slots} are free or held, and there are {self._all}"
