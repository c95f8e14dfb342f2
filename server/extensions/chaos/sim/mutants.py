"""Planted bugs: each must be found by the simulation, or the simulation proves nothing.

Owns: the bugs.  Does not know: how they are found.
Every one is a mistake that this code could make or that other engines have made, planted by replacing one method.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import msgspec

import engine.features.itl_target.turns as turns_module
import engine.scheduling.pages as holdings_module
from engine.actors.ingress import Ingress, _Open
from engine.actors.tokenizer import Tokenizer
from engine.features.host_tier.tier import Transfer
from engine.features.host_tier.tree import TieredTree
from engine.features.itl_target.turns import RowTurns
from engine.features.kv_store.planner import StorePlanner
from engine.features.kv_store.records import PageRecords
from engine.features.late_masks.planner import LateMasks
from engine.features.lora.planner import LoraPlanner
from engine.features.lora.slots import AdapterSlots
from engine.features.quarantine.suspects import Quarantine
from engine.features.shared_prefix.planner import SharedPrefixPlanner
from engine.features.speculation.messages import NAME
from engine.features.speculation.planner import SpeculationPlanner
from engine.kv.match import Match
from engine.kv.node import SHARED, Namespace, Node
from engine.kv.radix import RadixTree
from engine.messages import Abort, StepDone
from engine.plugins.policy.fair import FairShare
from engine.scheduling.completions import Completions
from engine.scheduling.decodes import Decodes
from engine.scheduling.pages import PageManager
from engine.scheduling.planner import Planner
from engine.scheduling.prefills import Prefills
from engine.scheduling.queue import RankedQueue
from engine.scheduling.requests import Requests
from engine.scheduling.rows import Rows, RowTable, Sequence
from engine.scheduling.step_builder import Appends, InFlight, StepBuilder, Wave

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """A bug.  owner: the class or module whose method it replaces.  made: gets that and returns what replaces it."""

    name: str
    owner: Any
    method: str
    made: Callable[[Method], Method]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is there within this context."""
        owner, name = self.owner, self.method
        assert hasattr(owner, name), f"{owner} has no {name} any more: plant {self.name} elsewhere"
        is_own = name in vars(owner)  # an inherited method stays inherited
        before, method = vars(owner).get(name), getattr(owner, name)
        setattr(owner, name, self.made(method))
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)


def made_from(owner: Any, method: str) -> Callable[[Callable[[Method], Method]], Mutant]:
    """Make a mutant of a function that gets the method as it is and returns the one in its place."""
    return lambda made: Mutant(made.__name__, owner, method, made)


def instead_of(owner: Any, method: str) -> Callable[[Method], Mutant]:
    """Make a mutant of a function that is called with the method as it is, and then the arguments of the call."""

    def mutant(called: Method) -> Mutant:
        def made(before: Method) -> Method:
            return lambda *given, **named: called(before, *given, **named)

        return Mutant(called.__name__, owner, method, made)

    return mutant


def mutants_of(module: ModuleType) -> list[Mutant]:
    """Return the mutants that a module defines."""
    return [one for one in vars(module).values() if isinstance(one, Mutant)]


# ---- pages --------------------------------------------------------------------------------------


@instead_of(PageManager, "release")
def a_page_is_freed_twice(release: Callable[..., None], self: PageManager, row: int) -> None:
    handle = self._handles[row]
    handle.num_pages = max(0, handle.num_pages - 1)  # the tree's last page is freed as if it were the row's own
    release(self, row)


@instead_of(PageManager, "release")
def a_page_leaks_when_a_row_is_released(release: Callable[..., None], self: PageManager, row: int) -> None:
    if self._table.num_pages[row] > self._handles[row].num_pages:
        self._table.num_pages[row] -= 1
    release(self, row)


@instead_of(Decodes, "_needy")
def a_page_comes_one_token_late(_: Method, self: Decodes) -> Rows:
    table, rows = self._table, self.rows
    return rows[table.num_computed[rows] > table.num_pages[rows] * table.page_size]


@instead_of(TieredTree, "drain_transfers")
def transfers_are_dropped(drain: Callable[..., list[Transfer]], self: TieredTree) -> list[Transfer]:
    return drain(self)[1:]


@made_from(TieredTree, "drain_transfers")
def transfers_come_a_step_late(drain: Callable[..., list[Transfer]]) -> Callable[..., list[Transfer]]:
    late: list[Transfer] = []

    def mutant(self: TieredTree) -> list[Transfer]:
        due, late[:] = list(late), drain(self)
        return due

    return mutant


# ---- the prefix cache ---------------------------------------------------------------------------


@instead_of(RadixTree, "unlock")
def an_unlock_is_missed(unlock: Callable[..., None], self: RadixTree, handle: Any) -> None:
    if handle.num_pages % 3 != 2:
        unlock(self, handle)


@instead_of(RadixTree, "lock")
def a_live_page_can_be_evicted(lock: Callable[..., Any], self: RadixTree, match: Any, priority: int = 0) -> Any:
    handle = lock(self, match, priority)
    self._lock_counts.release(handle.node)
    return handle


@instead_of(Node, "split")
def a_split_is_off_by_one(split: Callable[..., Node], self: Node, num_pages: int) -> Node:
    return split(self, num_pages - 1 if num_pages > 1 else num_pages)


@instead_of(PageManager, "publish")
def an_unfinished_page_is_published(publish: Callable[..., None], self: PageManager, row: int, num_tokens: int) -> None:
    size = self._page_size
    whole = -(-num_tokens // size) * size
    publish(self, row, whole if whole <= self._table.num_pages[row] * size else num_tokens)


@instead_of(PageManager, "publish")
def duplicates_are_freed_at_once(publish: Callable[..., None], self: PageManager, row: int, num_tokens: int) -> None:
    publish(self, row, num_tokens)
    self.collect(1 << 60)


@instead_of(PageManager, "take_rewrites")
def rows_keep_stale_pages_after_dedup(_: Method, self: PageManager) -> list[Appends]:
    self._rewrites = []
    return []


@made_from(holdings_module, "Namespace")
def salts_are_ignored(_: Callable[..., Namespace]) -> Callable[..., Namespace]:
    return lambda cache_salt="", adapter="": Namespace(adapter=adapter)


@made_from(holdings_module, "Namespace")
def pages_are_cached_under_the_wrong_adapter(_: Callable[..., Namespace]) -> Callable[..., Namespace]:
    return lambda cache_salt="", adapter="": Namespace(cache_salt)


@instead_of(AdapterSlots, "has_room")
def a_slot_is_filled_while_a_row_reads_it(_: Method, self: AdapterSlots, adapter: Any) -> bool:
    for slot in self._slots:
        slot.rows.clear()
    return True


@made_from(AdapterSlots, "take")
def an_adapter_is_not_put_where_its_row_reads(take: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, row, adapter: (take(self, row, adapter)[0], not self._num_uses % 3)


@instead_of(LoraPlanner, "reset")
def slots_outlive_the_device(reset: Callable[..., Any], self: LoraPlanner) -> Any:
    slots = self._slots
    held = reset(self)
    for slot in slots._slots:
        slot.rows.clear()
    self._slots = slots
    return held


@instead_of(PageManager, "num_cached_tokens")
def the_look_ahead_ignores_the_salt(_: Method, self: PageManager, sequence: Sequence) -> int:
    return self.tree.match(self._prefix_key(sequence), SHARED).num_cached * self._page_size


# ---- the store ----------------------------------------------------------------------------------


@made_from(PageRecords, "load")
def damaged_pages_are_used(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, page_hash, record: self.store.get(self._name(page_hash), record)


@instead_of(Match, "last_hash")
def the_store_does_not_know_salts(last_hash: Callable[..., bytes], self: Match) -> bytes:
    return last_hash(self if self.end is not None else Match(self.key, SHARED, self.version))


@instead_of(StorePlanner, "adopt")
def fetched_pages_land_off_by_one(
    adopt: Callable[..., None], self: StorePlanner, sequence: Sequence, *others: Any
) -> None:
    if (fetched := self._answered.get(sequence.request_id)) is not None:
        first_page = fetched.first_page - (fetched.num_pages > 1)
        self._answered[sequence.request_id] = replace(fetched, first_page=first_page)
    adopt(self, sequence, *others)


@instead_of(StorePlanner, "attach")
def pages_are_saved_a_step_late(attach: Callable[..., None], self: StorePlanner, step: StepBuilder) -> None:
    late, self._saves = self._saves, getattr(self, "late", [])
    attach(self, step)
    self.late = late  # type: ignore[attr-defined]


@instead_of(StorePlanner, "forget")
def who_waits_for_the_store_cannot_be_cancelled(
    forget: Callable[..., bool], self: StorePlanner, sequence: Sequence
) -> bool:
    waits = any(fetch.sequence is sequence for fetch in self._waiting.values())
    return waits or forget(self, sequence)


# ---- rows and turns -----------------------------------------------------------------------------


@instead_of(Completions, "_release_ended")
def a_row_is_reused_while_a_step_uses_it(release_ended: Callable[..., None], self: Completions) -> None:
    self._table.last_step[self._ended] = -1
    release_ended(self)


@instead_of(RowTable, "take")
def more_counts_as_computed_than_is(
    take: Callable[..., int], self: RowTable, sequence: Sequence, pages: Any, num_shared: int
) -> int:
    row = take(self, sequence, pages, num_shared)
    if 0 < self.num_computed[row] < self.num_known[row] - 1:
        self.num_computed[row] += 1
    return row


@instead_of(Prefills, "wait")
def a_retraction_forgets_a_token(wait: Callable[..., None], self: Prefills, sequence: Sequence) -> None:
    if len(sequence.tokens) > sequence.num_prompt:
        sequence.tokens = sequence.tokens[:-1]
    wait(self, sequence)


@instead_of(RankedQueue, "push")
def the_youngest_goes_first(push: Callable[..., None], self: RankedQueue, sequence: Sequence) -> None:
    rank, self._rank = self._rank, lambda one: (-one.arrival,)
    push(self, sequence)
    self._rank = rank


@instead_of(FairShare, "served")
def a_tenant_is_served_for_nothing(
    served: Callable[..., None], self: FairShare, tenant: str, num_prompt_tokens: int, num_output_tokens: int
) -> None:
    if tenant != "greedy":
        served(self, tenant, num_prompt_tokens, num_output_tokens)


@instead_of(SharedPrefixPlanner, "left")
def who_stands_aside_is_forgotten(_: Method, self: SharedPrefixPlanner, row: int) -> None:
    self._unshared.clear()


# ---- speculation --------------------------------------------------------------------------------


@instead_of(SpeculationPlanner, "waves")
def whatever_was_proposed_is_accepted(
    verified: Callable[..., Any], self: SpeculationPlanner, record: InFlight, sampled: Wave
) -> Any:
    drafts, at = {}, record.num_decodes
    for row, proposed in record.notes.get(NAME, {}).items():
        drafts[row] = tuple(sampled.tokens[at : at + len(proposed)].tolist())
        at += len(proposed) + 1
    return verified(self, replace(record, notes={NAME: drafts}), sampled)


@instead_of(SpeculationPlanner, "completed")
def a_row_goes_on_a_token_too_late(
    completed: Callable[..., None], self: SpeculationPlanner, record: InFlight, seconds: float
) -> None:
    completed(self, record, seconds)
    self._table.num_known[list(self._overrun)] += 1


@instead_of(SpeculationPlanner, "completed")
def the_device_is_not_told_where_a_row_goes_on(
    completed: Callable[..., None], self: SpeculationPlanner, record: InFlight, seconds: float
) -> None:
    completed(self, record, seconds)
    self._overrun.clear()


@instead_of(Completions, "num_done")
def a_rejected_page_is_published(num_done: Callable[..., int], self: Completions, row: int) -> int:
    # Where the row goes on, keys and values are still those of the token that was rejected there.
    speculating = [one for one in self._features.all if isinstance(one, SpeculationPlanner)]
    return num_done(self, row) + any(row in getattr(one._guesses, "_lines", ()) for one in speculating)


@made_from(SpeculationPlanner, "_room")
def more_is_proposed_than_a_request_may_say(_: Callable[..., int]) -> Callable[..., int]:
    return lambda self, row, num: num


# ---- the end of a request -----------------------------------------------------------------------


@instead_of(Completions, "complete")
def a_token_after_the_end_is_shown(complete: Callable[..., None], self: Completions, done: StepDone) -> None:
    ended, self._ended = self._ended, []
    complete(self, done)
    self._ended += ended


@instead_of(Ingress, "_end")
def a_request_ends_twice(end: Callable[..., _Open], self: Ingress, request_id: int) -> _Open:
    request = end(self, request_id)
    if request_id % 5 == 0:
        self._open[request_id] = request
    return request


@instead_of(Tokenizer, "_abort")
def a_cancel_is_lost(_: Method, self: Tokenizer, message: Abort) -> None:
    self._texts.pop(message.request_id, None)


@made_from(Ingress, "_expire")
def a_deadline_is_lost(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, request_id: None


# ---- another device -----------------------------------------------------------------------------


@made_from(RadixTree, "forget")
def the_cache_outlives_the_device(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self: None


@instead_of(Planner, "restart")
def who_ran_is_lost_with_the_device(restart: Callable[..., None], self: Planner, **how: bool) -> None:
    running = [sequence for sequence in self.requests.open.values() if sequence.row >= 0]
    restart(self, **how)
    for sequence in running:
        self._prefills.forget(sequence)


@instead_of(Planner, "restart")
def what_was_said_is_lost_with_the_device(restart: Callable[..., None], self: Planner, **how: bool) -> None:
    self.table.num_known[:] = self.table.num_prompt
    restart(self, **how)


@made_from(Requests, "take_over")
def who_waits_is_lost_with_the_planner(take_over: Callable[..., list[Sequence]]) -> Callable[..., list[Sequence]]:
    return lambda self, other: take_over(self, other)[1:]


@made_from(Quarantine, "note_loss")
def a_loss_blames_at_once(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, sequence, num_done, num_planned: True


@made_from(Quarantine, "first")
def suspects_run_together(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: self._suspects[0] if self._suspects else self.waiting.first()


@made_from(Ingress, "_has_left")
def a_cancelled_request_is_never_let_go_of(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, request_id: request_id in self._leaving


# ---- late masks ---------------------------------------------------------------------------------


@made_from(LateMasks, "take")
def a_late_row_takes_part_without_its_mask(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, part, done: False


@made_from(LateMasks, "attach")
def a_slow_row_is_in_two_steps_at_once(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, step: None


@instead_of(LateMasks, "_join")
def a_late_row_is_never_woken(join: Callable[..., None], self: LateMasks, row: int) -> None:
    self._out.discard(row)


@made_from(LateMasks, "_join_if_idle")
def a_late_row_that_is_alone_sits_out(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self: None


@instead_of(LateMasks, "_join")
def a_late_row_is_woken_twice(join: Callable[..., None], self: LateMasks, row: int) -> None:
    join(self, row)
    self._decodes.join(row)  # each of its tokens counts twice


@instead_of(LateMasks, "take")
def a_late_row_is_woken_before_its_step_is_done(
    take: Callable[..., bool], self: LateMasks, part: bytes, done: StepDone
) -> bool:
    return take(self, part, msgspec.structs.replace(done, step_id=done.step_id + 2))


@made_from(LateMasks, "left")
def a_late_row_comes_back_after_its_end(left: Callable[..., None]) -> Callable[..., None]:
    return lambda self, row: self._join_if_idle()


@made_from(LateMasks, "reset")
def late_rows_outlive_the_device(_: Callable[..., list[Sequence]]) -> Callable[..., list[Sequence]]:
    return lambda self: []


@instead_of(LateMasks, "completed")
def a_late_row_comes_back_with_its_turn(_: Method, self: LateMasks, record: InFlight, seconds: float) -> None:
    self._join_if_idle()


@instead_of(RowTurns, "_turn")
def a_turn_never_ends(turn: Callable[..., None], self: RowTurns) -> None:
    if not (self._out and len(self._decodes)):
        turn(self)


@instead_of(RowTurns, "_turn")
def who_waited_least_has_the_next_turn(turn: Callable[..., None], self: RowTurns) -> None:
    self._out = dict(reversed(self._out.items()))
    turn(self)


@instead_of(turns_module, "divided")
def a_tenant_with_few_rows_has_no_share(
    divided: Callable[..., dict[str, int]], most: int, wanted: dict[str, int]
) -> dict[str, int]:
    return {**divided(most, wanted), min(wanted, key=lambda one: (wanted[one], one)): 0}
