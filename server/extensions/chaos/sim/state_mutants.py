"""Planted bugs of states: each must be found by the simulation of models that have them.

Owns: the bugs.  Does not know: how they are found.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from engine.features.kv_store.planner import StorePlanner
from engine.features.states.messages import NAME, StateCopies
from engine.features.states.planner import StatesPlanner
from engine.features.states.slots import Copy, SnapshotSlots
from engine.features.states.tree import StateTree
from engine.kv.match import Match
from engine.kv.node import Handle, Node
from engine.kv.pages import Pages
from engine.scheduling.completions import Completions
from engine.scheduling.rows import Rows
from engine.scheduling.step_builder import InFlight, StepBuilder
from server.extensions.chaos.sim.mutants import Method, instead_of, made_from


@instead_of(StatesPlanner, "_rows_at_border")
def a_snapshot_is_taken_one_token_late(_: Method, self: StatesPlanner, rows: Rows) -> Rows:
    late: Rows = rows[(self._table.num_computed[rows] - 1) % self._page_size == 0]
    return late


@instead_of(StatesPlanner, "attach")
def a_state_is_published_before_its_step_completed(
    attach: Callable[..., None], self: StatesPlanner, step: StepBuilder
) -> None:
    attach(self, step)
    if step.prompts is not None:
        for row, end in zip(step.prompts.rows.tolist(), self._ends(step.prompts.rows), strict=True):
            self._completions._page_manager.publish(row, end)
            self.published(row, end)


@instead_of(StatesPlanner, "left")
def a_later_state_is_published_in_place_of_the_last(left: Callable[..., None], self: StatesPlanner, row: int) -> None:
    state = self._rows[row]
    state.copies[:-1], dropped = [], state.copies[:-1]
    for _, slot in dropped:
        self._slots.free(slot)
    if state.handle.num_pages:
        state.copies[:] = [(min(pages, state.handle.num_pages), slot) for pages, slot in state.copies]
    left(self, row)


@instead_of(Completions, "fail")
def a_failed_state_is_published(fail: Callable[..., None], self: Completions, row: int, error: Any) -> None:
    self._page_manager.publish(row, self.num_done(row) + 1)
    fail(self, row, error)


@instead_of(StatesPlanner, "started")
def a_fork_aliases(started: Callable[..., None], self: StatesPlanner, sequence: Any) -> None:
    """The second row that starts from a snapshot in a step is believed to use the first one's copy."""
    started(self, sequence)
    copies = self._slots.copies
    if len(copies) > 1 and copies[-1][0] in {slot for slot, _ in copies[:-1]}:
        copies.pop()


@instead_of(StateTree, "_split")
def pages_are_left_without_a_state(split: Callable[..., Node], self: StateTree, node: Node, num_pages: int) -> Node:
    """An evicted tail leaves its snapshot to the rest of its node."""
    above = split(self, node, num_pages)
    if (slot := self._snapshots.pop(node, None)) is not None:
        self._snapshots[above] = slot
    return above


@instead_of(StateTree, "_go_back")
def pages_without_a_state_are_matched(_: Method, self: StateTree, match: Match) -> None:
    """The deepest snapshot counts for all pages behind it."""
    pass


@instead_of(StateTree, "_detach")
def a_state_is_left_without_pages(_: Method, self: StateTree, node: Node) -> None:
    super(StateTree, self)._detach(node)


@instead_of(StateTree, "restore")
def pages_come_back_without_a_state(_: Method, self: StateTree, handle: Handle, key: bytes, pages: Pages) -> int:
    restored: int = super(StateTree, self).restore(handle, key, pages)  # type: ignore[misc]
    return restored


@made_from(StateTree, "_may_join")
def a_state_on_the_host_is_joined_away(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, node: True


@instead_of(StateTree, "_lose_snapshot")
def an_evicted_state_is_still_matched(lose: Callable[..., None], self: StateTree, node: Node) -> None:
    slot = self._snapshots.get(node)
    lose(self, node)
    if slot is not None and node.locks:
        self._snapshots[node] = slot


@instead_of(StatesPlanner, "attach")
def a_slot_is_freed_while_a_copy_in_flight_reads_it(
    attach: Callable[..., None], self: StatesPlanner, step: StepBuilder
) -> None:
    """The copies before a step are made a step later, when the slot may have another state."""
    late, self._slots.copies = self._slots.copies, getattr(self, "late", [])
    attach(self, step)
    self.late = late  # type: ignore[attr-defined]


@instead_of(StatesPlanner, "published")
def a_slot_has_two_owners(published: Callable[..., None], self: StatesPlanner, row: int, num_tokens: int) -> None:
    copies = self._rows[row].copies
    before = [*copies]
    published(self, row, num_tokens)
    copies[:0] = before[: len(before) - len(copies)][:1]


@instead_of(StatesPlanner, "left")
def a_slot_leaks_with_its_row(left: Callable[..., None], self: StatesPlanner, row: int) -> None:
    self._rows[row].copies[1:] = []
    left(self, row)


@instead_of(StateTree, "_may_grow")
def a_snapshot_stays_on_a_node_that_grows(_: Method, self: StateTree, node: Node, handle: Handle) -> bool:
    return super(StateTree, self)._may_grow(node, handle)


@instead_of(StateTree, "keep")
def a_snapshot_is_off_by_a_page(
    keep: Callable[..., None], self: StateTree, handle: Handle, num_pages: int, slot: int
) -> None:
    keep(self, handle, num_pages - (num_pages > 1), slot)


@instead_of(StatesPlanner, "completed")
def a_rejected_token_stays_in_the_state(
    completed: Callable[..., None], self: StatesPlanner, record: InFlight, seconds: float
) -> None:
    """Every step counts as one whose tokens were all right."""
    for row, aside in self._aside.items():
        self._aside[row] = aside._replace(end=self._completions.num_done(row))
    completed(self, record, seconds)


@instead_of(StatesPlanner, "attach")
def a_state_is_set_aside_behind_its_step(attach: Callable[..., None], self: StatesPlanner, step: StepBuilder) -> None:
    attach(self, step)
    if NAME in step.parts:
        copies = msgspec.msgpack.decode(step.parts[NAME], type=StateCopies)
        before, after = (np.frombuffer(one, np.int32).reshape(2, -1) for one in (copies.before, copies.after))
        of_rows = before[0] < self._table.running.shape[0]
        moved = np.concatenate((after, before[:, of_rows]), 1)
        step.parts |= StateCopies(before=before[:, ~of_rows].tobytes(), after=moved.tobytes()).part()


@instead_of(StatesPlanner, "_copies_of")
def a_copy_is_dropped(
    copies_of: Callable[..., Iterable[Copy]], self: StatesPlanner, row: int, num_tokens: int
) -> Iterable[Copy]:
    copies = copies_of(self, row, num_tokens)
    return copies if num_tokens % 5 else ()


@instead_of(StateTree, "_clear")
def snapshots_outlive_the_device(_: Method, self: StateTree) -> None:
    super(StateTree, self)._clear()


@made_from(StatesPlanner, "reset")
def states_of_rows_outlive_the_device(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: []


@instead_of(StorePlanner, "_note_state")
def a_state_is_stored_behind_other_pages(_: Method, self: StorePlanner, node: Node, slot: int) -> None:
    self._state_saves.append((node.page_hashes[0], slot))


@instead_of(StateTree, "arrive")
def pages_come_from_a_store_without_their_state(_: Method, self: StateTree, handle: Handle, number: int) -> None:
    """Pages count that have no state, and the row goes on from what its slot has."""
    slot = self.take_slot()
    assert slot is not None
    self.keep(handle, handle.num_pages, slot)


@made_from(SnapshotSlots, "free")
def a_slot_that_is_free_is_freed_no_more(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, slot: None
