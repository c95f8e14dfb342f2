"""Rows of weights that a linear kernel has taken as their file stores them, until it lays the weights out.

Owns: the rows and their places.  Does not know: formats, kernels.
"""

from collections import defaultdict

from torch import Tensor

from engine.layers.packing import StoredRows


class TakenRows:
    """Rows that kernels of one model have taken, by the storage of their weight and their place in it."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, dict[int, tuple[Tensor, StoredRows]]] = defaultdict(dict)

    def add(self, target: Tensor, rows: StoredRows) -> None:
        """Add the rows of a part of a weight."""
        self._rows[target.untyped_storage().data_ptr()][int(target.storage_offset())] = target, rows

    def all_of(self, weight_OI: Tensor) -> bool:
        """Return whether no row of the weight is missing."""
        return sum(len(rows.blocks) for _, rows in self._within(weight_OI).values()) == len(weight_OI)

    def pop(self, weight_OI: Tensor) -> list[tuple[Tensor, StoredRows]]:
        """Return (part of the weight, its rows) in the order of their first rows, and forget them."""
        parts = self._within(weight_OI)
        for offset in parts:
            del self._rows[weight_OI.untyped_storage().data_ptr()][offset]
        return [parts[offset] for offset in sorted(parts)]

    def _within(self, weight_OI: Tensor) -> dict[int, tuple[Tensor, StoredRows]]:
        """Return the rows of the weight by their offset: weights of several experts share one storage."""
        begin = int(weight_OI.storage_offset())
        rows = self._rows.get(weight_OI.untyped_storage().data_ptr(), {})
        return {offset: one for offset, one in rows.items() if begin <= offset < begin + weight_OI.numel()}
