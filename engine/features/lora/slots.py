"""Slots for adapters: which adapter each slot of the executors holds, and which rows read it.

Owns: the slots, in the state that the executors have after the steps planned so far.
Does not know: what an adapter is, names, files, why a row ends.
A slot keeps its adapter when its last row ends, and loses it to another one when it is the least recently used of those
that no row reads.  Slots are numbered from 1.
"""

from dataclasses import dataclass, field

from engine.features.lora.files import Adapter


@dataclass(slots=True)
class _Slot:
    """One slot.  digest: digest of its adapter, '' for none.  used_at: a count that grows with every use."""

    number: int
    digest: str = ""
    rows: set[int] = field(default_factory=set)
    used_at: int = 0


class AdapterSlots:
    """The slots of the executors.  num_slots: their number."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        self._of_row: dict[int, _Slot] = {}
        self._num_uses = 0

    def has_room(self, adapter: Adapter) -> bool:
        """Return whether ``take`` would find a slot: one that has the adapter, or one that no row reads."""
        return any(slot.digest == adapter.digest or not slot.rows for slot in self._slots)

    def holds(self, adapter: Adapter) -> bool:
        """Return whether a slot has the adapter."""
        return any(slot.digest == adapter.digest for slot in self._slots)

    def take(self, row: int, adapter: Adapter) -> tuple[int, bool]:
        """Let a row read the adapter, for which there is room.  Return the slot, and whether it must be filled."""
        slot = next((one for one in self._slots if one.digest == adapter.digest), None)
        is_new = slot is None
        if slot is None:
            unused = [one for one in self._slots if not one.rows]
            assert unused, f"row {row} needs a slot, and all {self.num_slots} slots are in use"
            slot = min(unused, key=lambda one: one.used_at)
            slot.digest = adapter.digest
        slot.rows.add(row)
        self._num_uses += 1
        slot.used_at = self._num_uses
        self._of_row[row] = slot
        return slot.number, is_new

    def release(self, row: int) -> None:
        """Note that neither the row nor a step in flight reads its slot any more."""
        self._of_row.pop(row).rows.discard(row)

    def forget(self, row: int) -> None:
        """Mark the row's slot as empty: the executors could not read its adapter, so the next use must fill it."""
        self._of_row[row].digest = ""
