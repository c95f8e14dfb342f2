"""A planner, a fake device and every stream that comes out: what the tests of scheduling work at."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.features.explain.timelines import Timelines
from engine.features.lora.files import Adapter
from engine.features.lora.messages import AdapterRead, ReadAdapter
from engine.kv.eviction import EvictionStrategy
from engine.messages import Admit, Failed, Finish, Step
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.plugins.policy.priority import MostUrgentFirst
from engine.scheduling.feature import NewFeature
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel, Proposer
from engine.scheduling.rows import PlannerLimits
from engine.types.notices import LossExplained
from engine.types.params import SamplingParams
from engine.types.prompt import Origin
from server.extensions.chaos.sim.planner_features import features_of
from tests.scheduling.fake_device import VOCAB, FakeDevice, expected_output

EOS = 3


class Bench:
    """A planner, a fake device, and every stream that comes out."""

    def __init__(self, *, depth: int = 2, max_running: int = 4, max_step_tokens: int = 64, prefill_chunk: int = 16,
                 page_size: int = 4, num_pages: int = 64, max_len: int = 128,
                 strategy: EvictionStrategy | None = None, policy: SchedulingPolicy | None = None,
                 proposer: Proposer | DraftModel | None = None, num_slots: int = 0, store_timeout_s: float = 0.0,
                 features: Sequence[NewFeature] = (), **limits: object) -> None:  # fmt: skip
        self.now = 0.0
        self.reads_adapters = bool(num_slots)  # at once
        has_host = bool(limits.get("num_host_pages"))
        self.timelines = Timelines(lambda: self.now)
        self.planner = Planner(
            PlannerLimits(max_running, max_step_tokens, prefill_chunk, page_size, num_pages, max_len, (EOS,), **limits),
            strategy or LeastRecentlyUsed(),
            policy or MostUrgentFirst(),
            lambda: self.now,
            features=[
                *features_of(proposer, num_slots, store_timeout_s, has_host=has_host, vocab_size=VOCAB),
                *features,
            ],
            watchers=(self.timelines,),
        )
        self.device = FakeDevice(
            max_running=max_running,
            max_len=max_len,
            page_size=page_size,
            num_pages=num_pages,
            num_host_pages=int(limits.get("num_host_pages", 0)),  # type: ignore[call-overload]
        )
        self.depth = depth
        self.num_pages = num_pages
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, list[Finish]] = {}
        self.expected: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.accepted: Counter[int] = Counter()
        self.metrics: dict[int, RequestMetrics] = {}
        self.steps: list[Step] = []
        self.started: list[int] = []
        self.turns: list[int] = []

    def submit(
        self,
        request_id: int,
        prompt: np.ndarray,
        *,
        salt: str = "",
        priority: int = 0,
        num_resumed: int = 0,
        tenant: str = "",
        adapter: Adapter | None = None,
        **params: object,
    ) -> None:
        prompt = np.asarray(prompt, dtype=np.int32)
        given = SamplingParams(temperature=0.0, **params)
        self.planner.admit(
            Admit(
                request_id=request_id,
                token_ids=prompt.tobytes(),
                params=given,
                priority=priority,
                cache_salt=salt,
                num_resumed=num_resumed,
                origin=Origin(tenant=tenant),
                parts=adapter.parts if adapter is not None else {},
            )
        )
        self.streams[request_id], self.ends[request_id] = [], []
        stops = frozenset(given.stop_token_ids) | (frozenset() if given.ignore_eos else {EOS})
        self.expected[request_id] = expected_output(prompt, given.max_tokens or 10_000, stops)

    def expect_short_outputs(self) -> None:
        """Teach the planner that requests end after a token, so that it admits more than will fit."""
        self.submit(99, prompt_of(1), max_tokens=1)
        self.finish()
        del self.cached[99]

    def plan(self) -> bool:
        """Plan and run one step if another may be in flight."""
        if self.planner.num_in_flight >= self.depth:
            return False
        step = self.planner.next_step()
        if self.reads_adapters and self.answer_readings():
            step = step or self.planner.next_step()
        if step is None:
            return False
        self.planner.check()
        self.device.run(step)
        self.steps.append(step)
        request_ids = self.planner.table.request_ids
        self.started += [int(request_ids[admission.row]) for admission in step.admissions]
        self.turns += request_ids[np.frombuffer(step.prefill_rows, dtype=np.int32)].tolist()
        return True

    def answer_readings(self, reason: str = "") -> bool:
        """Answer the requests to read adapters; returns whether there were any."""
        requests = [one for one in self.planner.outgoing() if not ReadAdapter.of(one).drop]
        for one in requests:
            self.planner.received(AdapterRead(reason).message(rank=0, number=one.number))
        self.read()
        return bool(requests)

    def step(self) -> None:
        """Plan one step and deliver its result."""
        assert self.plan(), "there was nothing to plan"
        self.deliver()

    def deliver(self) -> bool:
        """Deliver the oldest result."""
        if not self.device.done:
            return False
        self.planner.complete(self.device.done.popleft())
        self.planner.check()
        self.read()
        return True

    def read(self) -> None:
        for message in self.planner.outbox:
            if isinstance(message, Failed):
                self.ends[message.request_id].append(Finish.ERROR)
                continue
            self.cached |= {one: counts[0] for one, counts in message.cached_tokens.items()}
            self.created |= {one: counts[1] for one, counts in message.cached_tokens.items()}
            ids = np.frombuffer(message.request_ids, dtype=np.int64)
            tokens = np.frombuffer(message.token_ids, dtype=np.int32)
            for request_id, token, finish in zip(ids.tolist(), tokens.tolist(), message.finishes, strict=True):
                assert not self.ends[request_id], f"request {request_id} spoke after its end"
                if token >= 0:
                    self.streams[request_id].append(token)
                if finish:
                    self.ends[request_id].append(Finish(finish))
            for request_id, extras in message.extras.items():
                self.accepted[request_id] += extras.num_accepted
                said = len(self.streams[request_id])
                assert self.accepted[request_id] <= said, f"request {request_id}: more was accepted than {said} tokens"
        self.planner.outbox.clear()
        for metrics in self.planner.finished:
            assert metrics.request_id not in self.metrics, f"request {metrics.request_id} finished twice"
            self.metrics[metrics.request_id] = metrics
        self.planner.finished.clear()

    def finish(self) -> None:
        """Run until nothing is left, then check that nothing was."""
        while self.plan() or self.deliver():
            pass
        stats = self.planner.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == self.num_pages
        assert all(len(ends) == 1 for ends in self.ends.values())
        assert {identity: metrics.finish for identity, metrics in self.metrics.items()} == {
            identity: finish for identity, (finish,) in self.ends.items()
        }


def lose_the_device(bench: Bench, *, is_fault: bool = True) -> LossExplained | None:
    """A new device, as empty as the first one was; results of the old one never come.

    Returns what explains it, if one request was found to be the cause."""
    old = bench.device
    host_pages = len(old._host_pages)
    bench.device = FakeDevice(
        max_running=len(old._tokens),
        max_len=old._tokens.shape[1] - 1,
        page_size=old._page_size,
        num_pages=bench.num_pages,
        num_host_pages=host_pages,
    )
    bench.device.draft, bench.device.counts = old.draft, old.counts
    found = bench.planner.restart(is_fault=is_fault)
    bench.planner.check()
    stats = bench.planner.stats()
    assert (stats.running, stats.pages_used, stats.pages_cached) == (0, 0, 0)
    assert stats.pages_free == bench.num_pages
    return found


def segments(step: Step) -> dict[int, int]:
    """Row -> prompt tokens that a step computes of it."""
    rows, lengths = (np.frombuffer(column, dtype=np.int32) for column in (step.prefill_rows, step.prefill_lengths))
    return dict(zip(rows.tolist(), lengths.tolist(), strict=True))


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)
