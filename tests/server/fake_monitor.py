"""What an engine would show of itself: a real meter, a real radix tree, and gauges that a test may set."""

from collections.abc import Sequence as Items

import msgspec
import numpy as np

from engine.actors.snapshot import NO_VIEWS, Gauges, MailboxGauges, Snapshot, Views
from engine.features.explain.explanation import Explained
from engine.features.explain.watcher import NAME
from engine.kv.node import Namespace
from engine.kv.radix import RadixTree
from engine.messages import Finish
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.scheduling.board import MAX_NODES, Board, BoardRow, Pool
from engine.scheduling.meter import Meter, RequestMetrics, StepRecord
from engine.scheduling.rows import Sequence
from engine.types.notices import Profile
from engine.types.params import SamplingParams
from tests.kv.inserting import insert
from tests.server.fake_ingress import FakeIngress

PAGE = 16


class FakeMonitor:
    """The clock stands at ``now`` until somebody moves it."""

    def __init__(self, ingress: FakeIngress) -> None:
        self.now = 100.0
        self.meter: Meter | None = Meter(self.now)
        self.tree = RadixTree(PAGE, LeastRecentlyUsed())
        self.observers: list[object] = []
        self.profiles: list[Profile] = []
        self.rows: tuple[BoardRow, ...] = ()
        self.pool = Pool()
        self.explained: tuple[Explained, ...] = ()
        self.changed: dict[str, object] = {}  # of the gauges
        self._num_pages = 0
        self._ingress = ingress

    async def look(
        self, *, meter: bool = False, board: bool = False, views: Views = NO_VIEWS, patience_s: float = 0.0
    ) -> Snapshot:
        shown = Board(self.rows, 0, self.pool, self.tree.outline(MAX_NODES))
        meter_shown, board_shown = self.meter if meter else None, shown if board else Board()
        return Snapshot(
            number=0,
            now=self.now,
            gauges=self._gauges(),
            meter=meter_shown,
            board=board_shown,
            views=self._views(views),
        )

    def _views(self, views: Views) -> dict[str, bytes]:
        if NAME not in views:
            return {}
        asked = msgspec.msgpack.decode(views[NAME])
        return {NAME: msgspec.msgpack.encode([one for one in self.explained if one.request_id in asked])}

    def _gauges(self) -> Gauges:
        return msgspec.structs.replace(self._usual_gauges(), **self.changed)

    def _usual_gauges(self) -> Gauges:
        return Gauges(
            num_open=self._ingress.num_open,
            num_running=3,
            num_waiting=2,
            max_running=64,
            pages_free=50,
            pages_cached=30,
            pages_used=20,
            page_size=PAGE,
            num_in_flight=1,
            stalled_s=self._ingress.stalled_s,
            mailboxes=(MailboxGauges("scheduler", 1, 7, 2112),),
        )

    def decode(self, token_ids: Items[int]) -> str:
        return " ".join(map(str, token_ids))

    def watch(self, observer: object, name: str) -> None:
        self.observers.append(observer)

    def profile(self, ask: Profile) -> None:
        self.profiles.append(ask)

    def cache(self, tokens: list[int], salt: str = "") -> None:
        """As if a request had computed them."""
        count = len(tokens) // PAGE
        pages = np.arange(self._num_pages, self._num_pages + count, dtype=np.int32)
        self._num_pages += count
        insert(self.tree, self.tree.key(np.array(tokens, dtype=np.int32)), pages, Namespace(salt))

    def run(self, *, seconds: float, decodes: int, prefill_tokens: int = 0) -> None:
        """As if a step had completed."""
        assert self.meter is not None
        began, self.now = self.now, self.now + seconds
        number = self.meter.num_steps
        step = StepRecord(
            number, began, self.now, decodes, int(prefill_tokens > 0), prefill_tokens, num_next=decodes, num_first=0
        )
        self.meter.completed(step)

    def end(self, *, finish: Finish = Finish.STOP, ttft_s: float = 0.2, tokens: int = 10) -> None:
        """As if a request had gone all the way."""
        assert self.meter is not None
        sequence = Sequence(
            request_id=1,
            arrival=0,
            priority=0,
            params=SamplingParams(),
            tokens=np.zeros(40, dtype=np.int32),
            num_prompt=40,
            max_total=40 + tokens,
            stop_ids=(),
            arrived_at=0.0,
            started_at=0.03,
            num_cached_at_start=16,
        )
        self.meter.started(sequence, is_first=True)
        self.meter.first_token(sequence, ttft_s)
        self.meter.finished(sequence, RequestMetrics(1, finish, 40, tokens, 16, 0, self.now, 0.03, ttft_s, 0.012, 1.5))
