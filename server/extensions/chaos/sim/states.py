"""The states of a simulated device's rows: each is a hash of all tokens that it has seen.

Owns: the slots.  Does not know: tokens, pages, why a slot is copied.
A state is the value that lies where the row's last token has its K/V: the same sum over the same tokens.
"""

from collections.abc import Callable

import numpy as np

from engine.features.states.messages import ARRIVING, copies_of
from engine.messages import Step
from server.extensions.chaos.sim.failures import SimIncorrect
from server.extensions.chaos.sim.oracle import U64

LOST = np.uint64(0x105705710571057)


class SimStates:
    """The slots of ``num_rows`` rows, those of snapshots after them, and those in host memory."""

    def __init__(self, num_rows: int, num_snapshots: int, num_on_host: int, mark: Callable[[str], None]) -> None:
        self.is_on = num_snapshots > 0
        self._num_rows, self._first_on_host, self._mark = num_rows, num_rows + num_snapshots, mark
        self._slots = np.full(num_rows + num_snapshots + num_on_host, LOST, dtype=np.uint64)
        self._freed: dict[int, list[int]] = {}
        self.arrived: dict[int, U64] = {}

    def forget(self) -> None:
        """A new device: nothing of what was on the old one."""
        self._slots[:] = LOST
        self._freed.clear()
        self.arrived.clear()

    def saved(self, step_id: int, slot: int) -> bytes:
        """Return what a slot has before a step that saves it."""
        if self._slots[slot] == LOST:
            raise SimIncorrect(f"step {step_id} saves state {slot}, and it is lost")
        return self._slots[slot : slot + 1].tobytes()

    def lose(self, step_id: int, slots: list[int]) -> None:
        """The scheduler has freed these when it planned the step, which is the last that may read them."""
        self._freed[step_id] = slots

    def begin(self, step: Step) -> list[int]:
        """Make the copies before the batch; returns the rows that go back to a state of theirs."""
        copies = _pairs(copies_of(step).before)
        self._copy(step.step_id, copies)
        targets = {target for _, target in copies}
        self._slots[[slot for slot in self._freed.pop(step.step_id, []) if slot not in targets]] = LOST
        admitted = {one.row for one in step.admissions}
        return [target for _, target in copies if target < self._num_rows and target not in admitted]

    def check(self, step: Step, rows: np.ndarray, starts: np.ndarray, previous: U64) -> None:
        """Each row's state is that of the tokens before its start; a row that starts at 0 needs none.

        previous: what lies where the token before each start has its K/V."""
        wrong = np.flatnonzero((starts > 0) & (self._slots[rows] != previous)) if self.is_on else ()
        for at in wrong:
            kind = "lost" if self._slots[rows[at]] == LOST else "that of other tokens"
            raise SimIncorrect(f"step {step.step_id}: row {rows[at]} starts at {starts[at]}, and its state is {kind}")

    def advance(self, rows: np.ndarray, states: U64) -> None:
        """Rows have seen their tokens of a step."""
        self._slots[rows] = states

    def end(self, step: Step) -> None:
        """The copies after the batch."""
        copies = _pairs(copies_of(step).after)
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        if len({*targets}) < len(targets) or {*sources} & {*targets}:
            raise SimIncorrect(f"step {step.step_id} copies states {sources} to {targets}")
        self._copy(step.step_id, copies)

    def _copy(self, step_id: int, copies: list[list[int]]) -> None:
        """Copy one after the other."""
        for source, target in copies:
            if source < 0:
                self._slots[target] = self.arrived.pop(ARRIVING - source)[0]
                continue
            if self._slots[source] == LOST:
                raise SimIncorrect(f"step {step_id} copies state {source} to {target}, and it is lost")
            if max(source, target) >= self._first_on_host:
                self._mark("state to host" if target > source else "state from host")
            self._slots[target] = self._slots[source]


def _pairs(copies: bytes) -> list[list[int]]:
    pairs: list[list[int]] = np.frombuffer(copies, dtype=np.int32).reshape(2, -1).T.tolist()
    return pairs
