"""The scheduler actor: a shell around the planner.

consumes: Admit, Abort (tokenizer) · StepDone, FeatureAnswer, ExecutorsReady, ExecutorsLost (executors)
  Reconfigure (changeover) · Stop (system)
produces: Step, FeatureRequest (every executor, same order) · LossExplained (their group) · Tokens, Failed (tokenizer)
  EngineReady, EngineRecovering, Stats (ingress)
calls: observers, in batches, with finished requests and events of the prefix cache
waits for: a message; never for a peer.   owns: the life of every sequence and every page.
"""

import logging
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import ExecutorInbox, SchedulerInbox
from engine.actors.rank_results import RankResults
from engine.messages import Abort, Admit, Failed, FeatureAnswer, StepDone, Tokens
from engine.plugins.observers import Observers
from engine.scheduling.planner import Planner
from engine.scheduling.source import PlannerSource
from engine.types.errors import RequestError
from engine.types.notices import (
    EngineReady,
    EngineRecovering,
    ExecutorsLost,
    ExecutorsReady,
    LossExplained,
    Reconfigure,
    Stats,
)


class Scheduler(Actor[SchedulerInbox]):
    """Plans steps while fewer than the source's ``overlap_depth`` are in flight.

    source: builds the planner when executors have reported their number of pages.
    executors: one link per rank.  explain: called with the request that caused a loss, for their group.
    When executors are lost, requests keep their state and wait until all are ready again.
    """

    log = logging.getLogger(__name__)

    def __init__(
        self,
        *,
        capacity: int,
        source: PlannerSource,
        executors: Sequence[Link[ExecutorInbox]],
        explain: Callable[[LossExplained], None],
        tokenizer: Link[Tokens | Failed],
        ingress: Link[EngineReady | EngineRecovering | Stats],
        observers: Observers,
    ) -> None:
        super().__init__("scheduler", capacity)
        self._source = source
        self._overlap_depth = source.overlap_depth
        self._renews = False
        self._executors = executors
        self._explain = explain
        self._tokenizer = tokenizer
        self._ingress = ingress
        self._observers = observers
        self._is_ready = False
        self._results = RankResults(len(executors)) if len(executors) > 1 else None
        self._planner: Planner | None = None
        self._num_pages = 0
        self._last_stats: Stats | None = None

    def handle(self, message: SchedulerInbox) -> None:
        match message:
            case StepDone():
                if (result := self._results.add(message) if self._results is not None else message) is not None:
                    self._planned.complete(result)
            case Admit():
                self._admit(message)
            case FeatureAnswer():
                self._planned.received(message)
            case Abort(request_id=request_id, finish=finish):
                self._planned.abort(request_id, finish)
            case Reconfigure():
                self._reconfigure(message)
            case ExecutorsReady(num_pages=num_pages):
                self._executors_ready(num_pages)
            case ExecutorsLost():
                self._executors_lost(message)
            case _:
                assert_never(message)

    def flush(self) -> None:
        planner = self._planner
        if planner is None:
            return
        # Steps first: the device should not wait for the tokenizer.
        while self._is_ready and planner.num_in_flight < self._overlap_depth:
            if (step := planner.next_step()) is None:
                break
            for executor in self._executors:
                executor.put(step)
        for request in planner.outgoing():
            for executor in self._executors:
                executor.put(request)
        for message in planner.outbox:
            self._tokenizer.put(message)
        planner.outbox.clear()
        stats = planner.stats()
        if self._last_stats is None or msgspec.structs.replace(self._last_stats, step_id=stats.step_id) != stats:
            self._last_stats = stats
            self._ingress.put(stats)
        self._call_observers(planner)

    def _call_observers(self, planner: Planner) -> None:
        """Call the observers last: messages that were put above are delivered only after this returns."""
        if planner.finished:
            finished = tuple(planner.finished)
            planner.finished.clear()
            if self._observers.wants_requests:
                self._observers.request_finished(finished)
        if events := planner.pages.tree.drain_events():
            self._observers.kv_event(tuple(events))

    def close(self) -> None:
        self._observers.close()

    @property
    def idle(self) -> bool:
        """Whether no steps are in flight; all pages have come back only then."""
        return self._planner is None or self._planner.num_in_flight == 0

    @property
    def planner(self) -> Planner | None:
        """The planner, for reading only; None until the executors are ready for the first time."""
        return self._planner

    @property
    def _planned(self) -> Planner:
        assert self._planner is not None, "a request or a step arrived before the executors were ready"
        return self._planner

    def _admit(self, message: Admit) -> None:
        try:
            self._planned.admit(message)
            return
        except RequestError as refusal:
            error = refusal
        except Exception:  # from one request, or the policy that ranks it; the planner has not admitted it
            self.log.exception("request=%d failed in the scheduler", message.request_id)
            error = RequestError("internal error; the server log has the details", status=500, code="internal_error")
        self._tokenizer.put(Failed.of(message.request_id, error))

    def _reconfigure(self, message: Reconfigure) -> None:
        if message.blueprint:
            self._source.change(message.blueprint)
            self._overlap_depth = self._source.overlap_depth
        if message.renews:
            self._renews = True
        elif self._planner is not None:
            self._source.retune(self._planner)

    def _executors_ready(self, pages: int) -> None:
        self._is_ready = True
        if self._planner is None:
            self._planner = self._source.build(pages)
        elif self._renews:
            self._planner = self._source.build(pages).with_requests_of(self._planner)
        else:
            # Requests were admitted for the first pool's size, so later executors are started with the same size.
            assert pages >= self._num_pages, f"the pool had {self._num_pages} pages and came back with {pages}"
            pages = self._num_pages
        self._num_pages, self._renews = pages, False
        page_size = self._planner.requests.limits.page_size
        self.log.info("scheduler ready: pages=%d page_size=%d tokens=%d", pages, page_size, pages * page_size)
        self._ingress.put(EngineReady())

    def _executors_lost(self, lost: ExecutorsLost) -> None:
        self._is_ready = False
        if self._results is not None:
            self._results.clear()
        if self._planner is not None and (explained := self._planner.restart(is_fault=lost.is_fault)) is not None:
            self._explain(explained)
        self._ingress.put(EngineRecovering(reason=lost.reason, is_sleep=lost.is_sleep))
