"""A step whose lengths only the device knew, stated with the lengths that the host has read meanwhile.

Legend: R rows · K proposed tokens
Owns: the positions of such a step, by row.  Does not know: how lengths are read, why the host needs them.
"""

import numpy as np
from msgspec import structs

from engine.features.speculation.messages import Int32, Proposals
from engine.messages import Step


class KnownLengths:
    """The differences from the most that rows may have been.  lengths_R: of keys and values, before the step."""

    def __init__(self, proposals: Proposals, lengths_R: Int32) -> None:
        self._shifts_R = np.zeros_like(lengths_R)
        rows_K, positions_K, _ = proposals.columns()
        rows_B, first_B = np.unique(rows_K, return_index=True)
        # A row's first proposal comes after its last known token, which has no keys and values yet.
        self._shifts_R[rows_B] = lengths_R[rows_B] + 1 - positions_K[first_B]

    def step(self, step: Step) -> Step:
        """Return the step, or a part of it, with its true positions."""
        rows, starts = (np.frombuffer(one, dtype=np.int32) for one in (step.prefill_rows, step.prefill_starts))
        return structs.replace(step, prefill_starts=(starts + self._shifts_R[rows]).tobytes())

    def proposals(self, proposals: Proposals) -> Proposals:
        """Return proposals of the step, or of a part of it, with their true positions."""
        rows_K, positions_K, _ = proposals.columns()
        return structs.replace(proposals, positions=(positions_K + self._shifts_R[rows_K]).tobytes(), counted=b"")
