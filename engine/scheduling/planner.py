"""The planner: which rows compute which tokens in the next step.

Owns: the order of planning, retractions, the restart after executors were lost.
Does not know: tensors, text, actors, which features there are.
It plans without token values: a step may be planned while the one before it still runs, so an EOS is noticed one
step late and the token sampled after it is dropped.

``Decodes`` and ``Prefills`` plan the halves of a step, and ``Completions`` takes in its result; ``Requests`` has the
open requests, and ``PageManager`` the pages.  Optional parts are features (``feature.py``) or watchers (``events.py``).
"""

from collections.abc import Callable, Iterable

import numpy as np

from engine.kv.events import KVEvent
from engine.kv.eviction import EvictionStrategy
from engine.messages import Admit, FetchPages, Finish, PagesFetched, Stats, Step, StepDone
from engine.scheduling.board import Board, draw_board
from engine.scheduling.completions import Completions
from engine.scheduling.decodes import Decodes
from engine.scheduling.events import PlannerEvents
from engine.scheduling.feature import NewFeature, PlannerFeatures, PlannerParts
from engine.scheduling.meter import Meter
from engine.scheduling.pages import PageManager
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy
from engine.scheduling.prefills import Prefills, Segments
from engine.scheduling.queue import Quarantine, waiting_queue
from engine.scheduling.requests import OutputForecast, Requests
from engine.scheduling.rows import PlannerLimits, RowTable, Sequence
from engine.scheduling.step_builder import Columns, StepBuilder, column
from engine.types.notices import LossExplained


class Planner:
    """Continuous batching over rows and pages.

    clock: seconds, for metrics, the adaptive budget and whether speculation pays; no other decision depends on it.
    features: build the optional parts of this planner.  watchers: objects that outlive it, as in ``PlannerWatcher``.
    outbox, finished, meter: those of ``Requests``.  table, pages: others only read them."""

    def __init__(
        self,
        limits: PlannerLimits,
        strategy: EvictionStrategy,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
        *,
        features: Iterable[NewFeature] = (),
        watchers: Iterable[object] = (),
    ) -> None:
        self._clock = clock
        self._policy = policy
        self.table = RowTable(limits.max_running, limits.max_len, limits.page_size)
        self._features = PlannerFeatures()
        self._events = PlannerEvents()
        self.pages = PageManager(limits, self.table, strategy, self._features, self._events)
        self._forecast = OutputForecast()
        self._decodes = Decodes(self.table, self.pages)
        self._quarantine = Quarantine(waiting_queue(policy, self.table))
        self._prefills = Prefills(
            limits, self.table, self.pages, self._quarantine, self._forecast, self._features, self._events
        )
        meter = Meter(clock())
        self._watchers = (self._prefills, *watchers)
        self._events.install((meter, *self._watchers))
        self.requests = Requests(limits, self._forecast, self._quarantine, clock, meter, self._events)
        self.outbox, self.finished, self.meter = self.requests.outbox, self.requests.finished, meter
        self._completions = Completions(
            self.table, self.pages, self._decodes, self._prefills, self.requests, clock,
            self._features, self._events,
        )  # fmt: skip
        parts = PlannerParts(
            limits, self.table, self.pages, self._decodes, self._prefills, self.requests, self._completions,
            self._events,
        )  # fmt: skip
        self._features.install([build(parts) for build in features])
        self._num_steps = 0
        self._completed_at_blame = 0

    # ---- requests come and go ---------------------------------------------------------------

    def admit(self, message: Admit) -> None:
        """Queue a request.  Raises RequestError if it could never run."""
        sequence = self.requests.take_in(message)
        for admit in self._features.admit:
            admit(sequence, message)
        self._prefills.wait(sequence)  # first: a policy's plugin may raise
        self.requests.add(sequence)
        for arrived in self._events.arrived:
            arrived(sequence, message)

    def abort(self, request_id: int, finish: Finish = Finish.ABORT) -> None:
        """End a request wherever it is; an unknown id (it ended already) is no error.  finish: the reason to report."""
        sequence = self.requests.open.get(request_id)
        if sequence is None:
            return
        if sequence.row >= 0:
            self._completions.end(sequence.row, finish)
        else:
            self._prefills.forget(sequence)
            self.requests.end(sequence, finish, len(sequence.tokens))
        self.requests.send_end(request_id, finish)

    # ---- planning ---------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Plan a step: every decode row, then prefill chunks within the token budget.  None if nothing is to do."""
        features, in_flight = self._features, self._completions.in_flight
        if in_flight and (self._quarantine.is_on or any(awaits() for awaits in features.awaits_tokens)):
            return None
        if (builder := self._begin_step()) is None:
            return None
        for plan in features.plan:
            plan(builder)
        builder.appends += self.pages.take_rewrites()
        for attach in features.attach:
            attach(builder)
        step, record = builder.build()
        in_flight.append(record)
        for planned in self._events.planned:
            planned(step)
        return step

    def _begin_step(self) -> StepBuilder | None:
        """Return a step with its decode rows and prompts; None if there is nothing to do."""
        self.pages.tick(self._num_steps)
        while self._decodes.lack_pages() and self._retract_one():
            pass
        decode_rows, appends = self._decodes.plan()
        segments = self._prefills.plan(len(decode_rows)) if self._prefills.may_go_on else None
        if segments is not None and not segments.rows:
            segments = None
        if segments is None and not len(decode_rows):
            return None
        overlaps = bool(self._completions.in_flight)
        builder = StepBuilder(self._num_steps, self._clock(), decode_rows, overlaps, [appends])
        self._num_steps += 1
        self.table.last_step[decode_rows] = builder.step_id
        if segments is not None:
            self._add_prompts(builder, segments)
        return builder

    def _add_prompts(self, builder: StepBuilder, segments: Segments) -> None:
        """Add prompts.  If a chunk is the last one of its prompt, the row decodes from the next step on."""
        self.requests.started(segments.started, builder.launched_at)
        table, rows, samples = self.table, column(segments.rows), column(segments.samples)
        for row in rows[samples == 1].tolist():
            if table.num_planned[row] < table.max_total[row]:
                self._decodes.join(row)
        table.last_step[rows] = builder.step_id
        builder.admissions = segments.admissions
        builder.prompts = Columns(rows, column(segments.starts), column(segments.lengths), samples)

    def outgoing(self) -> list[FetchPages]:
        """Return the messages of features to the executors since the last call."""
        return [message for outgoing in self._features.outgoing for message in outgoing()]

    def received(self, message: PagesFetched) -> None:
        """Pass an executor's answer to the features."""
        for received in self._features.received:
            received(message)

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not yet completed."""
        return len(self._completions.in_flight)

    def complete(self, done: StepDone) -> None:
        """Take in the tokens of a step: note them, end requests that are done, free what no step uses any more."""
        self._completions.complete(done)
        if self._quarantine.is_on:
            self._release_suspect()

    # ---- losses -----------------------------------------------------------------------------

    def _retract_one(self) -> bool:
        """Send the least urgent, youngest running sequence back to the queue with its tokens.

        Return False if only one is left: it fits alone, by the check at admission."""
        table = self.table
        stays = np.flatnonzero(table.running & (table.num_planned < table.max_total)).tolist()
        running = [sequence for row in stays if (sequence := table.sequences[row]) is not None]
        if len(running) < 2:
            return False
        # With tenants, a low priority value protects no request: it orders the requests of its own tenant alone.
        least = 0 if isinstance(self._policy, TenantPolicy) else -(1 << 31)
        self._retract(max(running, key=lambda one: (max(one.priority, least), one.arrival)))
        self._forecast.note_retraction()
        return True

    def _retract(self, victim: Sequence) -> None:
        row, table = victim.row, self.table
        self._completions.leave(row)
        victim.tokens = table.tokens[row, : table.num_known[row]].copy()
        victim.row = -1
        self.requests.retracted(victim)
        self._prefills.wait(victim)

    def _release_suspect(self) -> None:
        """Retract the sequence that runs alone if it is past the place where executors were lost; the next follows."""
        quarantine, alone = self._quarantine, self._quarantine.alone
        if alone is not None and quarantine.passes(self._completions.num_done(alone.row)) and quarantine.is_on:
            self._retract(alone)
        self._prefills.unblock()

    def restart(self, *, is_fault: bool = True) -> LossExplained | None:
        """Start again with new executors: steps in flight never complete, all pages are empty, running sequences wait.

        Requests keep the tokens that they have, so that every stream goes on from its place.  is_fault: as in
        ``ExecutorsLost``.  Returns the explanation of the losses if one request, now ended, was found to cause them."""
        culprit = self._note_loss() if is_fault else None
        self._quarantine.begin()
        if not is_fault:
            self._quarantine.acquit_all()
        running = [sequence for sequence in self.requests.open.values() if sequence.row >= 0]
        for lost in self._events.lost:
            lost(running)
        for sequence in running:
            sequence.tokens = self.table.tokens[sequence.row, : self.table.num_known[sequence.row]].copy()
            sequence.row = -1
        self._completions.forget(last_launched=self._num_steps - 1)
        self.pages.forget()
        self._decodes.clear()
        self._prefills.clear()
        for sequence in running:
            if sequence is not culprit:
                self._prefills.wait(sequence)
        return self._end_culprit(culprit) if culprit is not None else None

    def _note_loss(self) -> Sequence | None:
        """Note a loss for every sequence in flight.  Return the one that causes the losses, if it is known now."""
        culprit = None
        in_flight = self._completions.in_flight
        under_way = {row for record in in_flight for row in (*record.sampled_rows.tolist(), *record.prefill_rows)}
        for row in sorted(under_way):
            sequence = self.table.sequences[row]
            if sequence is None or not self.table.running[row]:
                continue
            if self._quarantine.note_loss(sequence, self._completions.num_done(row), int(self.table.num_computed[row])):
                culprit = sequence
        return culprit

    def _end_culprit(self, culprit: Sequence) -> LossExplained:
        num_losses = self._quarantine.num_losses(culprit)
        self._quarantine.acquit_all()
        self.requests.blame(culprit, num_losses)
        before, self._completed_at_blame = self._completed_at_blame, self._completions.num_completed
        return LossExplained(num_losses=num_losses, executors_work=self._completed_at_blame > before)

    def with_requests_of(self, other: "Planner") -> "Planner":
        """Continue with the requests and the counters of a planner that was restarted.  Return this planner."""
        self._num_steps = other._num_steps
        self._completions.forget(last_launched=self._num_steps - 1)
        for sequence in self.requests.take_over(other.requests):
            self._prefills.wait(sequence)
        other._quarantine.rerank(lambda sequence: 0)  # a policy that stays counts what has been served
        self.meter = self.requests.meter
        self._events.install((self.meter, *self._watchers))
        return self

    def retune(self, limits: PlannerLimits, policy: SchedulingPolicy) -> None:
        """Plan by another policy, prefill chunk and latency target from now on; all else of ``limits`` stays."""
        self.requests.limits = limits
        self._prefills.retune(limits)
        if policy is not self._policy:
            self._policy = policy
            self._quarantine.reorder(waiting_queue(policy, self.table))

    # ---- views ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self.requests.open)

    @property
    def num_held(self) -> int:
        """Number of sequences that features hold."""
        return self._features.num_held

    @property
    def num_host_pages_used(self) -> int:
        """Number of pages of the host tier that hold something."""
        return self.pages.num_on_host

    def watch(self, watcher: object) -> None:
        """Add a watcher, which is called from now on."""
        self._watchers = (*self._watchers, watcher)
        self._events.install((self.meter, *self._watchers))

    def gauges(self) -> dict[str, int]:
        """Return the features' numbers of the present state, by name."""
        return {name: number for one in self._features.all for name, number in one.gauges().items()}

    @property
    def due_since(self) -> float:
        """Time from which on the completion of a step is due, provided that requests are open."""
        return max(self.requests.open_since, self.meter.last_completed_at)

    def board(self) -> Board:
        """Return the place of every request and the content of every page."""
        return draw_board(self.requests, self.table, self.pages, self._clock())

    def drain_kv_events(self) -> list[KVEvent]:
        """Return the events of cached pages since the last call; none unless ``limits.record_events``."""
        return self.pages.drain_events()

    def stats(self) -> Stats:
        """Return the gauges of this moment."""
        waiting = self._prefills.num_waiting
        return Stats(
            step_id=self._completions.last_completed,
            running=len(self.requests.open) - waiting,
            waiting=waiting,
            pages_free=self.pages.num_free,
            pages_cached=self.pages.num_cached,
            pages_used=self.pages.num_used,
        )

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and no row runs ahead of its end."""
        self.pages.check()
        self._decodes.check()
