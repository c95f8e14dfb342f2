"""The turns in which rows decode where all rows in each step would delay other tenants too much.

Owns: which rows sit steps out.  Does not know: how long a step takes, prompts.
A tenant that has its share of rows or fewer has all of them in each step.
"""

import math
from itertools import chain

from engine.features.itl_target.budget import StepBudget
from engine.scheduling.decodes import Decodes
from engine.scheduling.rows import RowTable

TURN = 8  # steps until rows that sit out take the place of others of their tenant


class RowTurns:
    """The turns of one planner.  budget: the number of rows that fit in a step is read from it."""

    def __init__(self, table: RowTable, decodes: Decodes, budget: StepBudget) -> None:
        self.budget = budget
        self._table = table
        self._decodes = decodes
        self._out: dict[int, None] = {}  # the row that has waited longest comes first
        self._most = math.inf  # rows that may decode until the turn is over
        self._num_steps_left = 0
        self._newest = ""  # the tenant whose row came last

    def started(self, tenant: str) -> None:
        """Note a tenant's new row.  It decodes later."""
        if tenant != self._newest:
            self._newest, self._most = tenant, 0

    def planned(self) -> None:
        """Begin another turn if more rows are to decode in the next step than may."""
        if len(self._decodes) > self._most:
            self._turn()

    def completed(self) -> None:
        """Note the end of a step, and begin another turn if it was the last of one or all other rows have left."""
        self._num_steps_left -= 1
        if self._num_steps_left <= 0 or (self._out and not len(self._decodes)):
            self._turn()

    def left(self, row: int) -> None:
        """Forget a row, and give its place to another one."""
        self._out.pop(row, None)
        if self._out:
            self._turn()

    def end(self) -> None:
        """Return all rows."""
        for row in self._out:
            self._decodes.join(row)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._out.clear()
        self._most = math.inf

    def _turn(self) -> None:
        """Choose the rows of the next steps."""
        self._num_steps_left = TURN
        decoding = self._decodes.rows.tolist()
        tenants: dict[str, list[int]] = {}
        for row in chain(self._out, reversed(decoding)):  # of those that decode, the last to come stays longest
            sequence = self._table.sequences[row]
            assert sequence is not None, f"row {row} is free"
            tenants.setdefault(sequence.tenant, []).append(row)
        most = self.budget.decodes() if len(tenants) > 1 else math.inf
        if len(decoding) + len(self._out) <= most:
            self.end()
            self._most = most
            return
        shares = divided(int(most), {tenant: len(rows) for tenant, rows in tenants.items()})
        chosen = {row for tenant, rows in tenants.items() for row in rows[: shares[tenant]]}
        for row in chosen.intersection(self._out):
            del self._out[row]
            self._decodes.join(row)
        for row in decoding:
            if row not in chosen:
                self._decodes.leave(row)
                self._out[row] = None
        self._most = len(chosen)


def divided(most: int, wanted: dict[str, int]) -> dict[str, int]:
    """Return each tenant's share of ``most`` rows: what it wants, or as much as any other that gets less than that.

    Each gets at least one."""
    shares: dict[str, int] = {}
    for tenant in sorted(wanted, key=lambda one: wanted[one]):
        left = len(wanted) - len(shares)
        shares[tenant] = min(wanted[tenant], max(1, most // left))
        most -= shares[tenant]
    return shares
