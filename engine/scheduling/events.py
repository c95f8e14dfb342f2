"""The planner's events: what happens to requests and steps, for the objects that watch.

Owns: the list of events, and which watcher gets which.  Does not know: what a watcher does with them.
The meter and the watchers of features are such objects.  An event costs one call for each watcher that has a method
for it, and nothing if none has one.  A watcher changes nothing that the planner reads and never reads the planner's
clock, so a planner makes the same plans with and without it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Literal

from engine.kv.eviction import Candidate, EvictionListener, EvictionStrategy, SortKey
from engine.kv.node import Handle
from engine.messages import Admit, Step
from engine.scheduling.meter import RequestMetrics, StepRecord
from engine.scheduling.rows import Sequence

Why = Literal["queue", "no_room", "aside", "fetch", "encode", "weights"]
"""The reason why a sequence has no row: others are ahead of it; too few pages; a running prefill computes its prefix;
its prefix is read from elsewhere; its pictures are encoded;
the weights that it adds are read."""


class PlannerWatcher:
    """An object that is called when something happens in a planner.  A subclass overrides what it needs."""

    def arrived(self, sequence: Sequence, message: Admit) -> None:
        """Called when a request is open; it is already queued."""

    def waits(self, sequence: Sequence, why: Why) -> None:
        """Called when a sequence waits for a row.  It may be called again with the same reason."""

    def matched(self, sequence: Sequence, handle: Handle, key: bytes, page_bytes: int) -> None:
        """Called before a sequence starts with the cached pages that its handle keeps.

        key: key of its whole prefix.  page_bytes: length of a page's part of the key."""

    def recomputes(self, sequence: Sequence, num_tokens: int) -> None:
        """Called when a sequence computes cached tokens again, since no snapshot of a state lies behind them."""

    def started(self, sequence: Sequence, *, is_first: bool) -> None:
        """Called when a sequence has got a row.  is_first: it had none before."""

    def computed(self, sequence: Sequence, step_id: int, num_tokens: int) -> None:
        """Called when a completed step has computed tokens of a sequence's prompt."""

    def decodes(self, sequence: Sequence) -> None:
        """Called when all known tokens of a sequence are computed, and its next one is sampled."""

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Called when a request has its first token."""

    def retracted(self, sequence: Sequence) -> None:
        """Called when a sequence has lost its row to others."""

    def evicted(self, request_id: int, candidate: Candidate) -> None:
        """Called when cached pages leave the pool to make room for a request."""

    def planned(self, step: Step) -> None:
        """Called before a step is sent."""

    def completed(self, step: StepRecord) -> None:
        """Called when a step has completed."""

    def finished(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        """Called when a request has ended."""

    def lost(self, running: Items[Sequence]) -> None:
        """Called when the executors are gone, with the rows of these sequences."""


class PlannerEvents:
    """The callbacks of each event, in the order of the watchers."""

    def __init__(self, watchers: Iterable[object] = ()) -> None:
        self.install(watchers)

    def install(self, watchers: Iterable[object]) -> None:
        """Call these watchers from now on."""
        watchers = tuple(watchers)
        self.arrived: Callbacks = callbacks(watchers, PlannerWatcher, "arrived")
        self.waits: Callbacks = callbacks(watchers, PlannerWatcher, "waits")
        self.matched: Callbacks = callbacks(watchers, PlannerWatcher, "matched")
        self.recomputes: Callbacks = callbacks(watchers, PlannerWatcher, "recomputes")
        self.started: Callbacks = callbacks(watchers, PlannerWatcher, "started")
        self.computed: Callbacks = callbacks(watchers, PlannerWatcher, "computed")
        self.decodes: Callbacks = callbacks(watchers, PlannerWatcher, "decodes")
        self.first_token: Callbacks = callbacks(watchers, PlannerWatcher, "first_token")
        self.retracted: Callbacks = callbacks(watchers, PlannerWatcher, "retracted")
        self.evicted: Callbacks = callbacks(watchers, PlannerWatcher, "evicted")
        self.planned: Callbacks = callbacks(watchers, PlannerWatcher, "planned")
        self.completed: Callbacks = callbacks(watchers, PlannerWatcher, "completed")
        self.finished: Callbacks = callbacks(watchers, PlannerWatcher, "finished")
        self.lost: Callbacks = callbacks(watchers, PlannerWatcher, "lost")


class WatchedEvictions:
    """An eviction strategy that also sends an event for each eviction.

    request_id: the request that will get the pages that are evicted next."""

    def __init__(self, strategy: EvictionStrategy, events: PlannerEvents) -> None:
        self.request_id = -1
        self.rank: Callable[[Candidate], SortKey] = strategy.rank
        self._note = strategy.evicted if isinstance(strategy, EvictionListener) else None
        self._events = events

    def evicted(self, candidate: Candidate) -> None:
        for evicted in self._events.evicted:
            evicted(self.request_id, candidate)
        if self._note is not None:
            self._note(candidate)


Callbacks = tuple[Callable[..., Any], ...]


def callbacks(objects: Iterable[object], base: type, name: str) -> Callbacks:
    """Return the objects' methods of that name, without those inherited from ``base``."""
    default = getattr(base, name)
    return tuple(getattr(one, name) for one in objects if getattr(type(one), name, default) is not default)
