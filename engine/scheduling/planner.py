"""The planner: which rows compute which tokens in the next step.

Owns: the order of planning, retractions, what is done after executors were lost.
Does not know: tensors, text, actors.
Plans without token values: a step may be planned while the one before it still runs, so an EOS is noticed one
step late and the token sampled after it is dropped.

The halves of a step are planned by ``Decodes`` and ``Prefills``, what it has brought is the work of ``Completions``;
``Requests`` has who is there, and ``PageManager`` who holds which page.
"""

from collections.abc import Callable
from operator import add
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.kv.events import KVEvent
from engine.kv.eviction import EvictionStrategy
from engine.messages import Admit, FetchPages, Finish, PagesFetched, Stats, Step, StepDone
from engine.scheduling.board import Board, draw_board
from engine.scheduling.completions import Completions, InFlight
from engine.scheduling.decodes import Decodes
from engine.scheduling.fetches import Fetches
from engine.scheduling.pages import Appends, PageManager
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy
from engine.scheduling.prefills import Prefills, Segments
from engine.scheduling.queue import Quarantine, waiting_queue
from engine.scheduling.requests import OutputForecast, Requests
from engine.scheduling.rows import PlannerLimits, Rows, RowTable, Sequence
from engine.types.notices import LossExplained

if TYPE_CHECKING:
    from engine.scheduling.drafts import Drafts

NewDrafts = Callable[[PlannerLimits, RowTable, PageManager, Decodes, Requests], "Drafts"]


class Planner:
    """Continuous batching over rows and pages.

    clock: seconds, for metrics, the adaptive budget and whether speculation pays; no other decision depends on it.
    drafts: builds what speculates; None if nobody does.  outbox, finished, meter: see ``Requests``."""

    def __init__(
        self,
        limits: PlannerLimits,
        strategy: EvictionStrategy,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
        drafts: NewDrafts | None = None,
    ) -> None:
        self._clock = clock
        self._policy = policy
        self._rows = RowTable(limits.max_running, limits.max_len, limits.page_size, limits.num_slots)
        self._page_manager = PageManager(limits, self._rows, strategy)
        self._forecast = OutputForecast()
        self._decodes = Decodes(self._rows, self._page_manager)
        self._quarantine = Quarantine(waiting_queue(policy, self._rows), clock)
        timelines = self._quarantine.timelines
        self._fetches = Fetches(limits, self._page_manager, self._quarantine.lets_wait, timelines)
        self._prefills = Prefills(
            limits, self._rows, self._page_manager, self._quarantine, self._forecast, self._fetches
        )
        self.requests = Requests(limits, self._forecast, self._quarantine, clock)
        self.outbox, self.finished, self.meter = self.requests.outbox, self.requests.finished, self.requests.meter
        parts = (limits, self._rows, self._page_manager, self._decodes, self.requests)
        self._drafts = drafts(*parts) if drafts is not None else None
        self._completions = Completions(
            self._rows, self._page_manager, self._decodes, self._prefills, self.requests, clock, self._drafts
        )
        self._num_steps = 0
        self._completed_at_blame = 0

    # ---- requests come and go ---------------------------------------------------------------

    def admit(self, message: Admit) -> None:
        """Queue a request.  Raises RequestError if it could never run."""
        sequence = self.requests.take_in(message)
        self._prefills.wait(sequence)
        self.requests.add(sequence)

    def abort(self, request_id: int, finish: Finish = Finish.ABORT) -> None:
        """End a request wherever it is; an unknown id (it ended already) is no error.  finish: what to call it."""
        sequence = self.requests.open.get(request_id)
        if sequence is None:
            return
        if sequence.row >= 0:
            self._completions.end(sequence.row, finish)
        else:
            self._prefills.forget(sequence)
            self.requests.end(sequence, finish, len(sequence.tokens))
        self.requests.tell_end(request_id, finish)

    # ---- planning ---------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Plan one step: every decode row first, then prefill chunks within the token budget.  None: nothing to do."""
        drafts, in_flight = self._drafts, self._completions.in_flight
        if in_flight and (self._quarantine.is_on or (drafts is not None and drafts.await_tokens)):
            return None
        if (step := self._next_step()) is None:
            return None
        if drafts is not None and len(in_flight) == 1:
            step, in_flight[0] = drafts.added_to(step, in_flight[0])
        return self.requests.timelines.steps.planned(self._page_manager.moves.added_to(step))

    def _next_step(self) -> Step | None:
        self._page_manager.tick(self._num_steps)
        while self._decodes.lack_pages() and self._retract_one():
            pass
        decode_rows, appends = self._decodes.plan()
        if self._prefills.may_go_on:
            segments = self._prefills.plan(len(decode_rows))
            if segments.rows:
                return self._launch_mixed(decode_rows, appends, segments)
        if not len(decode_rows):
            return None
        return self._launch(appends, InFlight(decode_rows, len(decode_rows), self._clock()), decode_rows)

    def _launch_mixed(self, decode_rows: Rows, appends: Appends, segments: Segments) -> Step:
        """A step with prefills, whose last chunks decode from the next step on."""
        now = self._clock()
        self.requests.started(segments.started, now)
        rows = np.array(segments.rows, dtype=np.int32)
        samples = np.array(segments.samples, dtype=np.int32)
        first_rows = rows[samples == 1]
        for row in first_rows.tolist():
            if self._rows.num_planned[row] < self._rows.max_total[row]:
                self._decodes.join(row)
        sampled = np.concatenate((decode_rows, first_rows))
        ends = tuple(map(add, segments.starts, segments.lengths))
        record = InFlight(sampled, len(decode_rows), now, tuple(segments.rows), ends, sum(segments.lengths))
        step = self._launch(appends, record, decode_rows)
        self._rows.last_step[rows] = step.step_id
        return msgspec.structs.replace(
            step,
            admissions=tuple(segments.admissions),
            prefill_rows=rows.tobytes(),
            prefill_starts=np.array(segments.starts, dtype=np.int32).tobytes(),
            prefill_lengths=np.array(segments.lengths, dtype=np.int32).tobytes(),
            prefill_samples=samples.tobytes(),
        )

    def _launch(self, appends: Appends, record: InFlight, decode_rows: Rows) -> Step:
        """Note a step as in flight; returns it without its prefills and what moves between the tiers."""
        step_id = self._num_steps
        self._num_steps += 1
        self._rows.last_step[decode_rows] = step_id
        self._completions.in_flight.append(record)
        if rewrites := self._page_manager.take_rewrites():
            every = [*rewrites, appends]
            appends = Appends(
                np.concatenate([one.rows for one in every]),
                np.concatenate([one.indexes for one in every]),
                np.concatenate([one.pages for one in every]),
            )
        return Step(
            step_id=step_id,
            table_rows=appends.rows.tobytes(),
            table_indexes=appends.indexes.tobytes(),
            table_pages=appends.pages.tobytes(),
            decode_rows=decode_rows.tobytes(),
        )

    def take_fetches(self) -> list[FetchPages]:
        """What the executors are to get from the store, since the last call."""
        return self._fetches.take_asked()

    def fetched(self, message: PagesFetched) -> None:
        """A rank has pages from the store: who waits for them may start once every rank has them."""
        if (sequence := self._fetches.arrived(message)) is not None:
            self._prefills.wait(sequence)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet completed."""
        return len(self._completions.in_flight)

    def complete(self, done: StepDone) -> None:
        """Take in a step's tokens: note them, end what ends, and free what no step uses any more."""
        self._completions.complete(done)
        if self._quarantine.is_on:
            self._release_suspect()

    # ---- what goes wrong --------------------------------------------------------------------

    def _retract_one(self) -> bool:
        """Send the least urgent, youngest running sequence back to the queue, keeping its tokens.

        False if only one is left: it fits alone, by the check at admission."""
        table = self._rows
        stays = np.flatnonzero(table.running & (table.num_planned < table.max_total)).tolist()
        running = [sequence for row in stays if (sequence := table.sequences[row]) is not None]
        if len(running) < 2:
            return False
        # With tenants, no request is kept because it names itself urgent: that orders those of its tenant alone.
        least = 0 if isinstance(self._policy, TenantPolicy) else -(1 << 31)
        self._retract(max(running, key=lambda one: (max(one.priority, least), one.arrival)))
        self._forecast.note_retraction()
        return True

    def _retract(self, victim: Sequence) -> None:
        row, table = victim.row, self._rows
        self._completions.leave(row)
        victim.tokens = table.tokens[row, : table.num_known[row]].copy()
        victim.row = -1
        self.requests.retracted(victim)
        self._prefills.wait(victim)

    def _release_suspect(self) -> None:
        """Once the sequence that runs alone is past the place where executors were lost, it makes room for the next."""
        quarantine, alone = self._quarantine, self._quarantine.alone
        if alone is not None and quarantine.passes(self._completions.num_done(alone.row)) and quarantine.is_on:
            self._retract(alone)
        self._prefills.unblock()

    def restart(self, *, is_fault: bool = True) -> LossExplained | None:
        """The device is a new one: steps in flight never come back, no page holds anything, whoever ran waits again.

        Everybody keeps the tokens they have, so that every stream goes on where it is.  is_fault: as in
        ``ExecutorsLost``.  Returns what explains the losses, if one request was found to bring them and has ended."""
        culprit = self._note_loss() if is_fault else None
        self._quarantine.begin()
        if not is_fault:
            self._quarantine.acquit_all()
        running = [sequence for sequence in self.requests.open.values() if sequence.row >= 0]
        self.requests.timelines.lost(running)
        for sequence in running:
            sequence.tokens = self._rows.tokens[sequence.row, : self._rows.num_known[sequence.row]].copy()
            sequence.row = -1
        self._completions.forget(last_launched=self._num_steps - 1)
        self._page_manager.forget()
        self._decodes.clear()
        self._prefills.clear()
        if self._drafts is not None:
            self._drafts.clear()
        for sequence in running:
            if sequence is not culprit:
                self._prefills.wait(sequence)
        return self._end_culprit(culprit) if culprit is not None else None

    def _note_loss(self) -> Sequence | None:
        """Of every sequence in flight.  Returns the culprit, if there is one now."""
        culprit = None
        in_flight = self._completions.in_flight
        under_way = {row for record in in_flight for row in (*record.sampled_rows.tolist(), *record.prefill_rows)}
        for row in sorted(under_way):
            sequence = self._rows.sequences[row]
            if sequence is None or not self._rows.running[row]:
                continue
            if self._quarantine.note_loss(sequence, self._completions.num_done(row), int(self._rows.num_computed[row])):
                culprit = sequence
        return culprit

    def _end_culprit(self, culprit: Sequence) -> LossExplained:
        num_losses = self._quarantine.num_losses(culprit)
        self._quarantine.acquit_all()
        self.requests.blame(culprit, num_losses)
        before, self._completed_at_blame = self._completed_at_blame, self._completions.num_completed
        return LossExplained(num_losses=num_losses, executors_work=self._completed_at_blame > before)

    def with_requests_of(self, other: "Planner") -> "Planner":
        """Go on with the requests of a planner that was restarted, and with what it has counted.  Returns itself."""
        self._num_steps = other._num_steps
        self._completions.forget(last_launched=self._num_steps - 1)
        for sequence in self.requests.take_over(other.requests):
            self._prefills.wait(sequence)
        other._quarantine.rerank(lambda sequence: 0)  # a policy that stays hears what has been served
        self.meter = self.requests.meter
        return self

    def retune(self, limits: PlannerLimits, policy: SchedulingPolicy) -> None:
        """Plan by another policy, prefill chunk and target of latency from now on; all else of ``limits`` stays."""
        self.requests.limits = limits
        self._prefills.retune(limits)
        if policy is not self._policy:
            self._policy = policy
            self._quarantine.reorder(waiting_queue(policy, self._rows))

    # ---- views ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.requests.open)

    @property
    def num_host_pages_used(self) -> int:
        """Pages of the host tier that hold something."""
        return self._page_manager.num_on_host

    @property
    def due_since(self) -> float:
        """Since when a step's completion has been waited for, provided that requests are open."""
        return max(self.requests.open_since, self.meter.last_completed_at)

    def board(self) -> Board:
        """Where every request is, and what every page holds."""
        return draw_board(self.requests, self._rows, self._page_manager, self._clock())

    def drain_kv_events(self) -> list[KVEvent]:
        """What happened to cached pages since the last call; nothing unless ``limits.record_events``."""
        return self._page_manager.drain_events()

    def stats(self) -> Stats:
        """Gauges of this moment."""
        waiting = self._prefills.num_waiting
        return Stats(
            step_id=self._completions.last_completed,
            running=len(self.requests.open) - waiting,
            waiting=waiting,
            pages_free=self._page_manager.num_free,
            pages_cached=self._page_manager.num_cached,
            pages_used=self._page_manager.num_used,
        )

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and no row runs ahead of its end."""
        self._page_manager.check()
        self._decodes.check()
