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

from engine.kv.eviction import EvictionStrategy
from engine.messages import Admit, FeatureAnswer, FeatureRequest, Finish, Step, StepDone
from engine.scheduling.completions import Completions
from engine.scheduling.decodes import Decodes
from engine.scheduling.events import PlannerEvents
from engine.scheduling.feature import NewFeature, PlannerFeatures, PlannerParts
from engine.scheduling.invariants import check_decodes
from engine.scheduling.meter import Meter
from engine.scheduling.pages import PageManager
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy
from engine.scheduling.prefills import Prefills
from engine.scheduling.queue import waiting_queue
from engine.scheduling.requests import OutputForecast, Requests
from engine.scheduling.rows import PlannerLimits, RowTable
from engine.scheduling.step_builder import NO_SEGMENTS, Segments, StepBuilder
from engine.types.notices import LossExplained, Stats


class Planner:
    """Continuous batching over rows and pages.

    clock: seconds, for metrics and for features that measure steps; no other decision depends on it.
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
        self.features = PlannerFeatures()
        self._events = PlannerEvents()
        self._forecast = OutputForecast()
        self.meter = Meter(clock())
        parts = PlannerParts(limits, clock, self.table, self.features, self._events)
        self.pages = parts.pages = PageManager(parts, strategy)
        self._decodes = parts.decodes = Decodes(self.table, self.pages)
        self._prefills = parts.prefills = Prefills(parts, waiting_queue(policy, self.table), self._forecast)
        self.requests = parts.requests = Requests(parts, self._forecast, self.meter)
        self._completions = parts.completions = Completions(parts)
        self.outbox, self.finished = self.requests.outbox, self.requests.finished
        self._watchers = tuple(watchers)
        self._events.install((self.meter, *self._watchers))
        self.features.install(build(parts) for build in features)
        self._num_steps = 0

    # ---- requests come and go ---------------------------------------------------------------

    def admit(self, message: Admit) -> None:
        """Queue a request.  Raises RequestError if it could never run."""
        sequence = self.requests.take_in(message)
        for admit in self.features.admit:
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
        features, in_flight = self.features, self._completions.in_flight
        if any(waits(len(in_flight)) for waits in features.waits) or (builder := self._begin_step()) is None:
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
        self.pages.tree.now = self._num_steps
        while self._decodes.lack_pages() and self._retract_one():
            pass
        decode_rows, appends = self._decodes.plan()
        segments = self._prefills.plan(len(decode_rows)) if self._prefills.may_go_on else NO_SEGMENTS
        if not segments.rows and not len(decode_rows):
            return None
        overlaps = bool(self._completions.in_flight)
        builder = StepBuilder(self._num_steps, self._clock(), decode_rows, overlaps, [appends])
        self._num_steps += 1
        self.table.last_step[decode_rows] = builder.step_id
        if segments.rows:
            self._add_prompts(builder, segments)
        return builder

    def _add_prompts(self, builder: StepBuilder, segments: Segments) -> None:
        """Add prompts.  If a chunk is the last one of its prompt, the row decodes from the next step on."""
        self.requests.started(segments.started, builder.launched_at)
        table, prompts = self.table, segments.columns()
        for row in prompts.rows[prompts.samples == 1].tolist():
            if table.num_planned[row] < table.max_total[row]:
                self._decodes.join(row)
        table.last_step[prompts.rows] = builder.step_id
        builder.admissions, builder.prompts = segments.admissions, prompts

    def outgoing(self) -> list[FeatureRequest]:
        """Return the messages of features to the executors since the last call."""
        return [message for outgoing in self.features.outgoing for message in outgoing()]

    def received(self, message: FeatureAnswer) -> None:
        """Pass an executor's answer to the features."""
        for received in self.features.received:
            received(message)

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not yet completed."""
        return len(self._completions.in_flight)

    def complete(self, done: StepDone) -> None:
        """Take in the tokens of a step: note them, end requests that are done, free what no step uses any more."""
        self._completions.complete(done)

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
        self._completions.retract(max(running, key=lambda one: (max(one.priority, least), one.arrival)))
        self._forecast.note_retraction()
        return True

    def restart(self, *, is_fault: bool = True) -> LossExplained | None:
        """Start again with new executors: steps in flight never complete, all pages are empty, running sequences wait.

        Requests keep the tokens that they have, so that every stream goes on from its place.  is_fault: as in
        ``ExecutorsLost``.  Returns the explanation of the losses if a feature has found and ended their cause."""
        explained = self.features.lost(is_fault=is_fault)
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
            self._prefills.wait(sequence)
        return explained

    def with_requests_of(self, other: "Planner") -> "Planner":
        """Continue with the requests and the counters of a planner that was restarted.  Return this planner."""
        self._num_steps = other._num_steps
        self._completions.forget(last_launched=self._num_steps - 1)
        for sequence in self.requests.take_over(other.requests):
            self._prefills.wait(sequence)
        other._prefills.queue.rerank(lambda sequence: 0)  # a policy that stays counts what has been served
        self.meter = self.requests.meter
        self._events.install((self.meter, *self._watchers))
        self.features.succeed(other.features)
        return self

    def retune(self, limits: PlannerLimits, policy: SchedulingPolicy) -> None:
        """Plan by another policy, prefill chunk and latency target from now on; all else of ``limits`` stays."""
        self.requests.limits = limits
        self._prefills.retune(limits)
        if policy is not self._policy:
            self._policy = policy
            self._prefills.queue = self._prefills.queue.moved_to(waiting_queue(policy, self.table))
        self.features.retuned(limits)

    # ---- views ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self.requests.open)

    def watch(self, watcher: object) -> None:
        """Add a watcher, which is called from now on."""
        self._watchers = (*self._watchers, watcher)
        self._events.install((self.meter, *self._watchers))

    def stats(self) -> Stats:
        """Return the gauges of this moment."""
        waiting, pages = self._prefills.num_waiting, self.pages
        return Stats(
            step_id=self._completions.last_completed,
            running=len(self.requests.open) - waiting,
            waiting=waiting,
            pages_free=pages.allocator.num_free,
            pages_cached=pages.tree.num_evictable,
            pages_used=pages.allocator.num_held - pages.tree.num_evictable,
        )

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and no row runs ahead of its end."""
        self.pages.check()
        check_decodes(self.table, self._decodes.rows)
