"""The monitor: a read-only view of an engine's activity.

Owns: nothing; it reads the actors' state on their own event loop, where no actor is in the middle of a change.
Does not know: HTTP, the names of metrics outside.
Nothing is prepared for it while steps are planned: a view is computed when it is requested.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.actors.ingress import Ingress
from engine.actors.scheduler import Scheduler
from engine.actors.snapshot import NO_VIEWS, Gauges, GetSnapshot, MailboxGauges, Snapshot, Views
from engine.actors.tokenizer import Tokenizer
from engine.plugins.observers import Observers
from engine.scheduling.board import Board, draw_board
from engine.scheduling.meter import Meter
from engine.scheduling.rows import PlannerLimits
from engine.types.notices import Profile
from engine.workers.executors import Executors
from engine.workers.frontend import RemoteIngress
from engine.workers.tokenizers import TokenizerPool


class Monitor:
    """A reader of one engine's actors.

    watchers: those of its planners, by name.  decode: turns token ids into text.  clock: the planner's, in seconds."""

    def __init__(
        self,
        *,
        ingress: Ingress | RemoteIngress,
        tokenizer: Tokenizer | TokenizerPool,
        scheduler: Scheduler,
        executors: Executors,
        observers: Observers,
        limits: PlannerLimits,
        watchers: Mapping[str, object],
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
    ) -> None:
        self._ingress = ingress
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._executors = executors
        self._observers = observers
        self._limits = limits  # until there is a planner, which has its own
        self._watchers = watchers
        self.decode = decode
        self._clock = clock

    @property
    def now(self) -> float:
        """The present time by the clock of the meter, in seconds."""
        return self._clock()

    @property
    def meter(self) -> Meter | None:
        """The planner's own counters, which callers only read; None until the model is loaded."""
        planner = self._scheduler.planner
        return planner.meter if planner is not None else None

    def gauges(self) -> Gauges:
        """Return the present state in numbers."""
        planner, ingress = self._scheduler.planner, self._ingress
        boxes = (ingress.inbox, self._tokenizer.inbox, self._scheduler.inbox, self._executors.inbox)
        mailboxes = tuple(MailboxGauges(box.name, len(box), box.peak, box.capacity, box.num_taken) for box in boxes)
        pool = self._tokenizer if isinstance(self._tokenizer, TokenizerPool) else None
        if pool is not None:
            # The numbers that each process reported last.
            mailboxes += tuple(
                MailboxGauges(slot.name, slot.waiting, slot.peak, pool.inbox.capacity) for slot in pool.slots
            )
        frontend = ingress if isinstance(ingress, RemoteIngress) else None
        if frontend is not None:
            mailboxes += (MailboxGauges("ingress", frontend.slot.waiting, frontend.slot.peak, frontend.inbox.capacity),)
        limits = planner.requests.limits if planner is not None else self._limits
        outside = Gauges(
            num_open=ingress.num_open,
            page_size=limits.page_size,
            max_running=limits.max_running,
            num_restarts=self._executors.num_restarts,
            num_tokenizers=pool.num_ready if pool is not None else 1,
            num_tokenizer_restarts=pool.num_restarts if pool is not None else 0,
            num_front_restarts=frontend.num_restarts if frontend is not None else 0,
            num_late_events=ingress.num_late_events if isinstance(ingress, Ingress) else 0,
            recovering=ingress.recovering,
            process=os.getpid(),
            mailboxes=mailboxes,
        )
        if planner is None:
            return outside
        stats = planner.stats()
        named = [(one.weights.partition(":")[0], one.row >= 0) for one in planner.requests.open.values()]
        adapted = [one for one in named if one[0]]
        return msgspec.structs.replace(
            outside,
            num_running=stats.running,
            num_waiting=stats.waiting,
            pages_free=stats.pages_free,
            pages_cached=stats.pages_cached,
            pages_used=stats.pages_used,
            num_in_flight=planner.num_in_flight,
            of_features=planner.features.gauges(),
            running_adapters=frozenset(digest for digest, is_running in adapted if is_running),
            waiting_adapters=frozenset(digest for digest, is_running in adapted if not is_running),
            stalled_s=max(0.0, self._clock() - planner.requests.due_since) if planner.num_open else 0.0,
        )

    def snapshot(self, ask: GetSnapshot) -> Snapshot:
        """Return the snapshot that ``ask`` requests.  Parts of it go on changing: read or encode it at once."""
        board = self.board() if ask.board else Board()
        return Snapshot(
            number=ask.number,
            now=self.now,
            gauges=self.gauges(),
            meter=self.meter if ask.meter else None,
            board=board,
            views=self._view(ask.views),
        )

    def _view(self, views: Views) -> dict[str, bytes]:
        """Return the requested views of features, computed now."""
        planner = self._scheduler.planner
        if planner is None:
            return {}
        known = {name: view for name in views if (view := getattr(self._watchers.get(name), "view", None)) is not None}
        return {name: view(views[name], planner.requests, self.now) for name, view in known.items()}

    async def look(
        self, *, meter: bool = False, board: bool = False, views: Views = NO_VIEWS, patience_s: float = 0.0
    ) -> Snapshot:
        """Return a snapshot.  The same call works if the engine is in another process."""
        return self.snapshot(GetSnapshot(meter=meter, board=board, views=dict(views)))

    def profile(self, ask: Profile) -> None:
        """Let the executors record steps, or stop it."""
        self._executors.profile(ask)

    def watch(self, observer: object, name: str) -> None:
        """Add an observer: an object with observer hooks, called from now on."""
        self._observers.add(observer, name)

    def board(self) -> Board:
        """Return the place of every request, and the content of every page."""
        planner = self._scheduler.planner
        if planner is None:
            return Board()
        return draw_board(planner.requests, planner.table, planner.pages, self.now)
