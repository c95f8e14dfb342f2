"""States in the planner: which states are copied to which slots, and when a copy becomes a snapshot of the tree.

Owns: the copies of each step, and copies that belong to a row so far.  Does not know: where snapshots are worth their
slot (a policy does), tensors.

A row that starts with cached pages gets the state behind them before its first step.  Chunks of a prompt end where the
policy wants a snapshot, and its state is copied behind that chunk's step.  When a step has filled a page of a row that
decodes, its state is copied too, since the row may end before the next page is full: its end makes the last such copy a
snapshot.  A copy becomes one when the pages before it are in the tree, and so when its step has completed.

A step that verifies proposed tokens of a row leaves its state behind all of them.  So the state before the step is set
aside, unless it is already, and if a token was wrong, the row's next step begins there: it computes the right tokens
again.  No such step goes past the end of a page, where the state is copied if all tokens were right.

Copies cost no wait: steps run in order, so a slot that is freed while a step in flight reads it is written later.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from engine.features.states.messages import NAME, StateCopies
from engine.features.states.slots import Copy, SnapshotSlots, num_for_rows, num_on_host, num_snapshots
from engine.features.states.tree import StateTree
from engine.kv.node import Handle, Namespace
from engine.kv.pages import Pages
from engine.plugins.features import FeatureContext
from engine.plugins.snapshots.policy import PromptPages, SnapshotPolicy, snapshot_policy
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Rows, Sequence
from engine.scheduling.step_builder import Columns, InFlight, StepBuilder

COPIES: Final = "states.copies"
MOST_AGAIN: Final = 4  # right tokens of a row that a step computes again beside proposed ones


@dataclass(slots=True, eq=False)
class RowState:
    """The state of one row.  handle: of its pages in the tree.  borders: tokens of its prompt after which its state is
    to be copied, ascending.  copies: (number of pages, slot) of its states that no node has, ascending."""

    handle: Handle
    borders: list[int]
    copies: list[Copy]


class SetAside(NamedTuple):
    """The state of a row behind ``start`` tokens, before a step that goes on to ``end`` and may be wrong."""

    start: int
    end: int
    slot: int


class StatesPlanner(PlannerFeature):
    """The states of one planner's rows.  num_slots: of snapshots on the device.  num_host: of those on the host."""

    order = 1  # pages come back from the host before a row gets the state behind them

    def __init__(self, parts: PlannerParts, *, policy: SnapshotPolicy, num_slots: int, num_host: int = 0) -> None:
        self._slots = SnapshotSlots(parts.limits.max_running, num_slots, num_host)
        parts.pages.use(StateTree, slots=self._slots)
        assert isinstance(parts.pages.tree, StateTree)
        self._tree = parts.pages.tree
        self._table = parts.table
        self._completions = parts.completions
        self._events = parts.events
        self._page_size = parts.limits.page_size
        self._policy = policy
        self._rows: dict[int, RowState] = {}
        self._aside: dict[int, SetAside] = {}
        self._starting: tuple[Handle, bytes] | None = None
        self._num_recomputed = 0

    # ---- rows that start --------------------------------------------------------------------

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        """Note what keeps the cached pages of a row that starts; features after this one may add some."""
        self._starting = handle, key

    def started(self, sequence: Sequence) -> None:
        """Give a row the state behind its cached pages, and plan the copies of its prompt."""
        assert self._starting is not None, f"row {sequence.row} starts, and its prefix is not known"
        (handle, key), self._starting = self._starting, None
        found = PromptPages(
            num_pages=len(key) // self._tree.page_bytes,
            num_of_prompt=(sequence.num_prompt - 1) // self._page_size,
            num_cached=self._tree.num_pages_of(key, Namespace(sequence.cache_salt, sequence.weights)),
            num_with_state=handle.num_pages,
        )
        if handle.num_pages:
            self._slots.copies.append((self._tree.slot_of(handle), sequence.row))
        if num_again := (found.num_cached - found.num_with_state) * self._page_size:
            self._num_recomputed += num_again
            for recomputes in self._events.recomputes:
                recomputes(sequence, num_again)
        wanted = {pages for pages in self._policy.of_prompt(found) if found.num_with_state < pages <= found.num_pages}
        self._rows[sequence.row] = RowState(handle, [pages * self._page_size for pages in sorted(wanted)], [])

    def chunk_tokens(self, row: int, most: int) -> int:
        """Let a chunk end where the row's state is to be copied."""
        borders = self._rows[row].borders
        return min(most, borders[0] - int(self._table.num_computed[row])) if borders else most

    def shared_tokens(self, row: int, most: int, least: int) -> int:
        """Return the last place of a prompt with a state that another one may use, which may be where the two part."""
        state, parting = self._rows[row], most // self._page_size * self._page_size
        is_ahead = parting >= max(least, int(self._table.num_computed[row]) + 1)
        if self._policy.keeps_branches and is_ahead and parting not in state.borders:
            insort(state.borders, parting)
        copied = (pages * self._page_size for pages, _ in state.copies)
        return max((border for border in (*copied, *state.borders) if border <= most), default=0)

    # ---- steps ------------------------------------------------------------------------------

    def verified_tokens(self, row: int, most: int) -> int:
        """Let a row's tokens be verified up to the end of its page, if there are slots to set states aside.

        None if many are computed again: the row's next step begins at the state behind one without proposals."""
        if self.recomputed_tokens(row) > MOST_AGAIN:
            return 0
        num_rows = len(self._rows) - len(self._aside)
        if row not in self._aside and num_rows > self._tree.num_to_take:
            return 0
        return min(most, -int(self._table.num_known[row]) % self._page_size)

    def recomputed_tokens(self, row: int) -> int:
        """Return the number of tokens between the state that was set aside and the row's last token."""
        aside = self._aside.get(row)
        return 0 if aside is None else int(self._table.num_known[row]) - 1 - aside.start

    def prefill_tokens(self, num_decodes: int, most: int) -> int:
        """Leave room for tokens that are computed again."""
        return most - sum(map(self.recomputed_tokens, self._aside))

    def attach(self, step: StepBuilder) -> None:
        """Add the copies before and after a step."""
        if step.inserted is not None:
            self._set_aside(step.inserted)
        after: list[Copy] = []
        if step.prompts is not None:
            for row, end in zip(step.prompts.rows.tolist(), self._ends(step.prompts.rows), strict=True):
                borders = self._rows[row].borders
                if borders and borders[0] == end:
                    del borders[0]
                    after += self._copies_of(row, end)
        if self._policy.keeps_turns:
            decoding = [step.decode_rows] if step.inserted is None else [step.decode_rows, step.inserted.rows]
            rows = self._rows_at_border(np.concatenate(decoding))
            for row, end in zip(rows.tolist(), self._ends(rows), strict=True):
                after += self._copies_of(row, end)
            if len(rows):
                step.notes[NAME] = rows
        if before := self._slots.send():
            step.notes[COPIES] = True
        if before or after:
            step.parts |= StateCopies(before=_column(before), after=_column(after)).part()

    def _set_aside(self, verified: Columns) -> None:
        """Set states aside before a step that verifies tokens, and give rows back those set aside before."""
        for row, start, samples in np.stack([verified.rows, verified.starts, verified.samples], 1).tolist():
            aside, end = self._aside.pop(row, None), int(self._table.num_computed[row])
            slot = None if aside is None else aside.slot
            if slot is not None:
                self._slots.copies.append((slot, row))
            elif samples > 1:
                slot = self._tree.take_slot()
                assert slot is not None, f"no slot for the state of row {row}, whose tokens are verified"
                self._slots.copies.append((row, slot))
            if slot is not None and samples > 1:
                self._aside[row] = SetAside(start, end, slot)
            elif slot is not None:
                self._slots.free(slot)

    def _ends(self, rows: Rows) -> list[int]:
        ends: list[int] = self._table.num_computed[rows].tolist()
        return ends

    def _rows_at_border(self, rows: Rows) -> Rows:
        """Return those of a step's rows that fill a page with it."""
        return rows[self._table.num_computed[rows] % self._page_size == 0]

    def _copies_of(self, row: int, num_tokens: int) -> Iterable[Copy]:
        """Return the copy of a row's state after a step, if there is a slot for it."""
        if (slot := self._tree.take_slot()) is None:
            return ()
        self._rows[row].copies.append((num_tokens // self._page_size, slot))
        return ((row, slot),)

    # ---- copies that become snapshots -------------------------------------------------------

    def published(self, row: int, num_tokens: int) -> None:
        """Give the tree the states of a prompt, as far as it has the pages."""
        state = self._rows[row]
        while state.copies and state.copies[0][0] <= state.handle.num_pages:
            self._tree.keep(state.handle, *state.copies.pop(0))

    def completed(self, record: InFlight, seconds: float) -> None:
        """Free copies of rows that decode and have filled another page, and states set aside if all tokens were right.

        No other step was in flight with one that verified tokens."""
        if COPIES in record.notes:
            self._slots.arrived()
        for row, aside in [*self._aside.items()]:
            num_done = self._completions.num_done(row)
            if num_done == aside.end:
                self._slots.free(self._aside.pop(row).slot)
            else:
                self._free_behind(self._rows[row], num_done)
        for row in record.notes.get(NAME, ()):
            if (state := self._rows.get(row)) is not None:
                self._free_before(state, self._completions.num_done(row) // self._page_size)

    def left(self, row: int) -> None:
        """Give the tree the state behind the last full page; the row's other copies are of no use."""
        state = self._rows.pop(row)
        if row in self._aside:
            self._slots.free(self._aside.pop(row).slot)
        self._free_before(state, state.handle.num_pages)
        if state.copies and state.copies[0][0] <= state.handle.num_pages:
            self._tree.keep(state.handle, *state.copies.pop(0))
        for _, slot in state.copies:
            self._slots.free(slot)

    def _free_before(self, state: RowState, num_pages: int) -> None:
        """Free all copies but the last that is not behind so many pages, and those that are."""
        while len(state.copies) > 1 and state.copies[1][0] <= num_pages:
            self._slots.free(state.copies.pop(0)[1])

    def _free_behind(self, state: RowState, num_done: int) -> None:
        """Free the copy at the end of a page that has a wrong token, of which ``num_done`` are right."""
        if state.copies and state.copies[-1][0] * self._page_size > num_done:
            self._slots.free(state.copies.pop()[1])

    def reset(self) -> list[Sequence]:
        for slot in self._slots_of_rows():
            self._slots.free(slot)
        self._rows.clear()
        self._aside.clear()
        self._slots.reset()
        return []

    # ---- views ------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """Return the number of snapshots in the tree, and of cached tokens that were computed again so far."""
        return {"state_snapshots": self._tree.num_snapshots, "tokens_without_state": self._num_recomputed}

    def check(self) -> None:
        """Raise AssertionError unless every slot is free, or one row's, or one node's."""
        self._slots.check([*self._slots_of_rows(), *self._tree.slots_held()])

    def _slots_of_rows(self) -> list[int]:
        copies = [slot for state in self._rows.values() for _, slot in state.copies]
        return copies + [aside.slot for aside in self._aside.values()]


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None for a model without states.  Raises PluginError."""
    if not context.state_bytes:
        return None
    assert context.plugins is not None, "a model with states needs the plugin that places snapshots"
    policy = snapshot_policy(context.plugins, context.config.kv.page_size)
    return partial(_new_feature, policy, num_for_rows(context.config))


def _new_feature(policy: SnapshotPolicy, num_for_rows: int, parts: PlannerParts) -> StatesPlanner:
    limits = parts.limits
    num_slots, num_host = num_snapshots(limits.num_pages, num_for_rows), num_on_host(limits.num_host_pages)
    return StatesPlanner(parts, policy=policy, num_slots=num_slots, num_host=num_host)


def _column(copies: list[Copy]) -> bytes:
    return np.array(copies, dtype=np.int32).T.tobytes()
