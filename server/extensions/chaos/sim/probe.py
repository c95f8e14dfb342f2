"""The one place that knows private names of the engine: how a planner is built, watched, and looked into.

Owns: those names.  Does not know: what is right or wrong.
"""

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from engine.actors.ingress import Ingress
from engine.actors.supervisor import Supervisor
from engine.actors.tokenizer import Tokenizer
from engine.features.host_tier.tree import TieredTree
from engine.features.itl_target.planner import TargetPlanner
from engine.features.kv_store.planner import StorePlanner
from engine.features.lora.planner import LoraPlanner
from engine.features.quarantine.planner import QuarantinePlanner
from engine.features.quarantine.suspects import Quarantine
from engine.features.shared_prefix.planner import SharedPrefixPlanner
from engine.features.speculation.planner import SpeculationPlanner
from engine.features.states.planner import StatesPlanner
from engine.features.states.tree import StateTree
from engine.kv.eviction import EvictionStrategy
from engine.kv.node import Handle, Namespace, Node
from engine.kv.pages import Pages
from engine.messages import Finish, Step, StepDone
from engine.plugins.eviction.fifo import FirstInFirstOut
from engine.plugins.eviction.lfu import LeastFrequentlyUsed
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.eviction.priority import LeastUrgent
from engine.plugins.eviction.s3fifo import S3FIFO
from engine.plugins.eviction.slru import SegmentedLRU
from engine.plugins.policy.fair import FairOptions, FairShare
from engine.plugins.policy.fcfs import FirstComeFirstServed
from engine.plugins.policy.lpm import LongestPrefixMatch
from engine.plugins.policy.priority import MostUrgentFirst
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.scheduling.feature import PlannerParts
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel
from engine.scheduling.rows import PlannerLimits, Sequence
from engine.scheduling.step_builder import StepBuilder
from server.extensions.chaos.sim.late_rows import LateRows
from server.extensions.chaos.sim.liars import Everything, Liar
from server.extensions.chaos.sim.oracle import VOCAB, Oracle, as_prompt
from server.extensions.chaos.sim.planner_features import features_of
from server.extensions.chaos.sim.scenario import SimSetup
from server.extensions.chaos.sim.turn_rows import TurnRows

STRATEGIES: dict[str, Callable[[], EvictionStrategy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "slru": lambda: SegmentedLRU(2),
    "s3fifo": lambda: S3FIFO(24, small=0.25, ghosts=1.0),
    "priority": LeastUrgent,
}
POLICIES: dict[str, Callable[[int], SchedulingPolicy]] = {
    "fcfs": lambda _: FirstComeFirstServed(),
    "priority": lambda _: MostUrgentFirst(),
    "lpm": LongestPrefixMatch,
    "fair": lambda _: FairShare(FairOptions()),
}


def build_planner(
    setup: SimSetup, num_pages: int, clock: Callable[[], float], before: Planner | None, watchers: Iterable[object] = ()
) -> Planner:
    """A planner as the engine builds it.  before: the one whose place it takes, and whose policy stays."""
    limits = PlannerLimits(
        max_running=setup.max_running,
        max_step_tokens=setup.max_step_tokens,
        prefill_chunk=setup.prefill_chunk,
        page_size=setup.page_size,
        num_pages=num_pages,
        max_len=setup.max_len,
        eos_token_ids=setup.eos_token_ids,
        num_host_pages=setup.num_host_pages,
        itl_target_s=setup.itl_target_s,
        record_events=setup.record_events,
        lookahead=int(bool(setup.proposer) and setup.drafted and not setup.store_timeout_s),
    )
    liar = liar_of(setup)
    drafted = DraftModel(path="", num_tokens=liar.num_tokens, max_len=setup.max_len)
    features = features_of(None, setup.num_slots, setup.store_timeout_s, has_host=bool(setup.num_host_pages))
    if setup.num_snapshots:
        policy_of_states = EndsAndBranches(*setup.keeps)
        features.append(
            partial(StatesPlanner, policy=policy_of_states, num_slots=setup.num_snapshots, num_host=setup.num_on_host)
        )
    if setup.proposer:
        features.append(partial(_speculation, proposer=drafted if setup.drafted else liar))
    policy = POLICIES[setup.policy](setup.max_overtaken) if before is None else before._policy
    return Planner(limits, STRATEGIES[setup.eviction](), policy, clock, features=features, watchers=watchers)


def liar_of(setup: SimSetup) -> Liar:
    """Return the proposer, of the planner or of the device."""
    return Liar(setup.proposer, next_token, VOCAB, setup.num_proposed)


def next_token(tokens: "abc.Sequence[int]") -> int:
    """Return the next token of the device's model."""
    return Oracle(as_prompt(list(tokens))).next()


def _speculation(parts: PlannerParts, proposer: Liar | DraftModel) -> SpeculationPlanner:
    speculation = SpeculationPlanner(parts, proposer=proposer, vocab_size=VOCAB)
    if proposer.num_tokens != 2:  # else what is verified is what the simulated clock says that it pays
        speculation._payoff = Everything()
    return speculation


def store_of(planner: Planner) -> StorePlanner | None:
    """The planner's part of the store; None if it has none."""
    return next((one for one in planner.features.all if isinstance(one, StorePlanner)), None)


def states_of(planner: Planner) -> StatesPlanner | None:
    """The planner's part of states; None for a model without them."""
    return next((one for one in planner.features.all if isinstance(one, StatesPlanner)), None)


def quarantine_of(planner: Planner) -> Quarantine:
    """The planner's quarantine."""
    (feature,) = (one for one in planner.features.all if isinstance(one, QuarantinePlanner))
    return feature.quarantine


class Probe:
    """A planner under observation.

    mark: called with names of scarce events.  poison: called with pages that have become free.
    save: called with those that a step which has just been planned will save.
    lose: called with the slots of states that are freed until a step is planned, with its id.
    overlap: the most steps in flight."""

    def __init__(
        self,
        planner: Planner,
        mark: Callable[[str], None],
        poison: Callable[[Pages], None],
        save: Callable[[Pages], None],
        lose: Callable[[int, list[int]], None] = lambda step_id, slots: None,
        overlap: int = 1,
    ) -> None:
        self.planner = planner
        self._mark = mark
        self._poison = poison
        self._save = save
        self._page_manager = planner.pages
        self._allocator = planner.pages.allocator
        self._tree = planner.pages.tree
        self._rows = planner.table
        self._late_rows = LateRows()
        self._turn_rows = TurnRows(overlap)
        wrap(self._allocator, "free", self._watch_free)
        wrap(self._tree, "evict", self._watch_evict)
        wrap(self._tree, "publish", self._watch_publish)
        self._store = store_of(planner)
        if self._store is not None:
            wrap(self._store, "attach", self._watch_saves)
        self._states = states_of(planner)
        self._lose = lose
        self._slots_freed: list[int] = []
        if self._states is not None:
            wrap(self._states._slots, "free", self._watch_slot)
            wrap(self._states._tree, "keep", self._watch_keep)
            wrap(self._states, "attach", self._watch_copies)
            wrap(self._states, "left", self._watch_left)
        planner.features.install(planner.features.all)  # their hooks are those now
        wrap(planner, "abort", self._watch_abort)
        wrap(planner, "complete", self._watch_complete)

    # ---- what happens -----------------------------------------------------------------------

    def _watch_free(self, free: Callable[[Pages], None], pages: Pages) -> None:
        free(pages)
        saving = [as_pages(pages) for _, pages in self._store._saves] if self._store is not None else []
        if saving:
            pages = pages[~np.isin(pages, np.concatenate(saving))]  # the next step still copies what is in them
        tree = self._tree
        transfers = tree.host._transfers if isinstance(tree, TieredTree) else []
        leaving = [one.device_pages for one in transfers if one.to_host]
        if leaving:
            # Their content is still to be copied, by the step that is being planned; the device poisons them after.
            pages = pages[~np.isin(pages, np.concatenate(leaving))]
        self._poison(pages)

    def _watch_evict(self, evict: Callable[[int], Pages], count: int) -> Pages:
        pages = evict(count)
        if len(pages):
            self._mark("eviction")
        return pages

    def _watch_publish(self, publish: Callable[..., Any], *arguments: Any) -> Any:
        published = publish(*arguments)
        if len(published.pages):
            self._mark("duplicates rewritten")
        return published

    def _watch_saves(self, attach: Callable[[StepBuilder], None], step: StepBuilder) -> None:
        assert self._store is not None
        for _, pages in self._store._saves:
            self._save(as_pages(pages))
        attach(step)

    def _watch_slot(self, free: Callable[[int], None], slot: int) -> None:
        free(slot)
        self._slots_freed.append(slot)

    def _watch_keep(self, keep: Callable[..., None], handle: Handle, num_pages: int, slot: int) -> None:
        assert isinstance(self._tree, StateTree)
        before = self._tree.num_snapshots
        keep(handle, num_pages, slot)
        self._mark("snapshot" if self._tree.num_snapshots > before else "snapshot twice")

    def _watch_copies(self, attach: Callable[[StepBuilder], None], step: StepBuilder) -> None:
        assert self._states is not None
        self._watch_starts(self._states)
        before = self._states._tree.num_snapshots
        attach(step)
        if self._states._tree.num_snapshots < before:
            self._mark("snapshot evicted for another")
        freed, self._slots_freed = self._slots_freed, []
        self._lose(step.step_id, freed)

    def _watch_starts(self, states: StatesPlanner) -> None:
        before = [(slot, row) for slot, row in states._slots.copies if row < self.planner.requests.limits.max_running]
        slots = [slot for slot, _ in before]
        if len({*slots}) < len(slots):
            self._mark("states for two rows")
        for _, row in before:
            sequence = self._rows.sequences[row]
            if sequence is not None and sequence.num_retractions:
                self._mark("state of a retracted row")

    def _watch_left(self, left: Callable[[int], None], row: int) -> None:
        assert isinstance(self._tree, StateTree)
        before = self._tree.num_snapshots
        left(row)
        if self._tree.num_snapshots > before:
            self._mark("snapshot of an output")

    def _watch_abort(self, abort: Callable[..., None], request_id: int, finish: Finish = Finish.ABORT) -> None:
        planner = self.planner
        sequence = planner.requests.open.get(request_id)
        if sequence is None:
            self._mark("abort of an ended request")
        elif sequence.row < 0:
            self._mark("abort while queued")
        elif self._rows.last_step[sequence.row] > planner._completions.last_completed:
            self._mark("abort in flight")
        else:
            self._mark("abort between steps")
        abort(request_id, finish)

    def _watch_complete(self, complete: Callable[[StepDone], None], done: StepDone) -> None:
        record, *behind = self.planner._completions.in_flight
        if not self._rows.running[record.sampled_rows].all():
            self._mark("token after the end dropped")
        self._late_rows.completed(done, record, behind)
        complete(done)

    def planned(self, step: Step) -> None:
        """Check the rows of a step that has just been planned."""
        *before, record = self.planner._completions.in_flight
        self._late_rows.planned(step, record, before)
        (target,) = (one for one in self.planner.features.all if isinstance(one, TargetPlanner))
        out = target._turns._out
        tenants = {row: one.tenant for row, one in enumerate(self._rows.sequences) if one is not None}
        at_work = {tenant for row, tenant in tenants.items() if row not in out}
        self._turn_rows.planned(step, {row: tenants[row] for row in out}, at_work)
        if out:
            self._mark("rows take turns")

    # ---- what is ----------------------------------------------------------------------------

    @property
    def page_counts(self) -> tuple[int, int, int, int]:
        """Pages: free, in the tree, private to a row, deferred.  They must make up the pool."""
        return page_counts(self.planner)

    @property
    def num_pages(self) -> int:
        """The number of pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_protected(self) -> int:
        """Pages in the tree that some handle keeps."""
        return self._tree.num_protected

    @property
    def num_rows_held(self) -> int:
        """Rows that have not come back."""
        return len(self._rows.sequences) - self._rows.num_free

    @property
    def num_fetches(self) -> int:
        """Requests that wait for pages from the store, or have got some and not started."""
        return len(self._store._waiting) + len(self._store._answered) if self._store is not None else 0

    @property
    def is_in_quarantine(self) -> bool:
        """Whether suspects run one at a time."""
        return quarantine_of(self.planner).is_on

    def started(self, step: Step) -> list[Sequence]:
        """Return the sequences that got a row in this step, in order; it has just been planned."""
        planner = self.planner
        ids = [int(self._rows.request_ids[admission.row]) for admission in step.admissions]
        return [planner.requests.open[request_id] for request_id in ids]

    def waiting(self) -> Iterator[Sequence]:
        """Return the sequences without a row, but for those that stand aside until something is computed or read."""
        (shared,) = (one for one in self.planner.features.all if isinstance(one, SharedPrefixPlanner))
        aside = {sequence.arrival for entries in shared._waiting.values() for _, sequence in entries}
        if aside:
            self._mark("stood aside to share")
        if self._store is not None:
            aside |= {fetch.sequence.arrival for fetch in self._store._waiting.values()}
        for lora in (one for one in self.planner.features.all if isinstance(one, LoraPlanner)):
            aside |= {held.arrival for read in lora._readings._all.values() for held in read.held.values()}
        return (one for one in self.planner.requests.open.values() if one.row < 0 and one.arrival not in aside)

    def looked_ahead(self, sequence: Sequence) -> int:
        """Cached tokens of a sequence without a row, as the planner counts them to order and to delay."""
        return self._page_manager.num_cached_tokens(sequence)

    def cached_tokens(self, sequence: Sequence) -> int:
        """The same, page by page through what the tree has under the sequence's own salt."""
        key, page_bytes = self._page_manager.match(sequence).key, self._tree.page_bytes
        node: Node | None = self._tree._roots.get(Namespace(sequence.cache_salt, sequence.weights))
        at = with_state = 0
        while node is not None:
            for start in range(0, len(node.key), page_bytes):
                if key[at : at + page_bytes] != node.key[start : start + page_bytes]:
                    return (at if self._states is None else with_state) // page_bytes * self._tree.page_size
                at += page_bytes
            if isinstance(self._tree, StateTree) and node in self._tree._snapshots:
                with_state = at
            node = next((one for one in node.children.values() if key.startswith(one.first, at)), None)
        return (at if self._states is None else with_state) // page_bytes * self._tree.page_size

    def check_states(self) -> None:
        """Every slot has one owner."""
        if self._states is not None:
            self._states.check()

    @property
    def num_states_held(self) -> int:
        """Slots that rows hold besides their own."""
        return self._states._slots.num_held - self._states._tree.num_snapshots if self._states is not None else 0


def as_pages(raw: bytes) -> Pages:
    """Page indices out of their bytes."""
    return np.frombuffer(raw, dtype=np.int32)


def wrap(owner: Any, name: str, watcher: Callable[..., Any]) -> None:
    """Replace a method of one object by ``watcher``, which gets the method and its arguments."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: watcher(method, *arguments))


def num_texts(tokenizer: Tokenizer) -> int:
    """Requests that the tokenizer still knows."""
    return len(tokenizer._texts)


def is_encoding(tokenizer: Tokenizer, request_id: int) -> bool:
    """Whether a request is between its arrival at the tokenizer and its admission."""
    text = tokenizer._texts.get(request_id)
    return text is not None and text.stream is None


def queued_tokens(ingress: Ingress) -> int:
    """Prompt tokens of open requests, as ingress estimates them."""
    return ingress._queued_tokens


def cause_of_death(supervisor: Supervisor) -> BaseException | None:
    """Return the error of the first actor that crashed."""
    return supervisor._cause


def num_in_house(ingress: Ingress) -> int:
    """Requests that ingress counts: open ones, and cancelled ones of which the engine has not let go."""
    return len(ingress._open) + len(ingress._leaving)


def page_counts(planner: Planner) -> tuple[int, int, int, int]:
    """Return the pages of a planner: free, in the tree, private to a row, deferred."""
    pages, rows = planner.pages, planner.table
    private = sum(int(rows.num_pages[row]) - handle.num_pages for row, handle in pages._handles.items())
    deferred = sum(len(some) for _, some in pages._deferred)
    return pages.allocator.num_free, pages.tree.num_cached, private, deferred
