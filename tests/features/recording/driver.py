"""A recorded scheduler with the engine's own plugins, a fake device, and faults: minutes of traffic in a moment.

Owns: the traffic, and virtual time.  Does not know: what is done with the recording.
"""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from engine.config import Config, build_config
from engine.features.lora.files import NAME, Adapter
from engine.features.lora.messages import AdapterRead, ReadAdapter
from engine.features.recording.recorder import RecordedScheduler, Recorder
from engine.messages import Abort, Admit, FeatureRequest, Step
from engine.plugins.blueprint import Blueprint, BlueprintPlanners, without_secrets
from engine.plugins.observers import Observers
from engine.scheduling.rows import PlannerLimits
from engine.types.notices import ExecutorsLost, ExecutorsReady, Reconfigure
from engine.types.params import Grammar, SamplingParams
from engine.types.prompt import Origin
from tests.scheduling import fake_device
from tests.scheduling.fake_device import VOCAB, FakeDevice

EOS = 3
PAGE = 4
NUM_PAGES = 96
SIZES: dict[str, Any] = {"max_running": 8, "max_len": 160}
SECRET = "sesame, open now"


class Mailman:
    """A link that keeps what was put."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def put(self, message: Any) -> None:
        self.messages.append(message)


def periodic(context: np.ndarray) -> int:
    """A model that repeats itself, so that speculation pays."""
    return 10 + len(context) % 3


class Driver:
    """A driver of a recorded scheduler.  names: kind -> plugin.  found: as in ``Blueprint``.

    All else as ``Recorder`` has it."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int = 1 << 30,
        prompts: str = "hashed",
        names: dict[str, str] | None = None,
        seed: int = 0,
        waited_s: float = 1e9,
        found: tuple[str, ...] = (),
    ) -> None:
        names = names or {"eviction": "s3fifo", "policy": "fair", "proposer": "ngram"}
        self.now = 1000.0
        self._rng = random.Random(seed)
        limits = PlannerLimits(
            **SIZES, max_step_tokens=64, prefill_chunk=16, page_size=PAGE, num_pages=0, eos_token_ids=(EOS,),
            num_host_pages=32, itl_target_s=0.02,
        )  # fmt: skip
        full = {kind: f"{kind}.{name}" for kind, name in names.items()}
        given = build_config(
            Config(),
            {
                "kv": {"page_size": PAGE, "num_host_pages": 32},
                "server": {"api_key": SECRET},
                "lora": {"folder": "/adapters", "max_adapters": 2},
            },
        )
        self.blueprint = Blueprint(limits, 2, VOCAB, SIZES["max_len"], full, without_secrets(given, full), found=found)
        plugins = self.blueprint.plugins()
        self.recorder = Recorder(
            self.blueprint, plugins, folder=folder, limit_bytes=limit_bytes, prompts=prompts, waited_s=waited_s,
            clock=self._clock,
        )  # fmt: skip
        self._executor, self.said = Mailman(), Mailman()
        self.scheduler = RecordedScheduler(
            recorder=self.recorder,
            capacity=1000,
            source=BlueprintPlanners(self.blueprint, plugins, self.recorder.clock),
            executors=[self._executor],
            explain=lambda message: None,
            tokenizer=self.said,
            ingress=self.said,
            observers=Observers(plugins, {}, page_size=PAGE),
        )
        self.prompts: list[np.ndarray] = []
        self.num_requests = 0
        self._new_device()
        self.tell(ExecutorsReady(num_pages=NUM_PAGES))

    def _clock(self) -> float:
        self.now += self._rng.uniform(1e-6, 1e-4)
        return self.now

    def _new_device(self) -> None:
        self.device = FakeDevice(**SIZES, page_size=PAGE, num_pages=NUM_PAGES, num_host_pages=32)

    def tell(self, *messages: Any) -> None:
        """One batch, as the mailbox hands it over; then the device runs what was planned."""
        for message in messages:
            self.scheduler.handle(message)
        self.scheduler.flush()
        given = self._executor.messages[:]
        self._executor.messages.clear()
        with mock.patch.object(fake_device, "next_token", periodic):
            for plan in given:
                if isinstance(plan, Step):
                    self.device.run(plan)
        requests = (one for one in given if isinstance(one, FeatureRequest) and one.feature == NAME)
        if read := [AdapterRead().message(0, one.number) for one in requests if not ReadAdapter.of(one).drop]:
            self.tell(*read)

    def finish_step(self) -> bool:
        """The oldest step in flight is done."""
        if not self.device.done:
            return False
        self.now += self._rng.uniform(0.03, 0.09)
        self.tell(self.device.done.popleft())
        return True

    def change(self, blueprint: Blueprint, *, renews: bool) -> None:
        """Send the message that ``engine/control/changeover.py`` sends."""
        self.tell(Reconfigure(blueprint=msgspec.msgpack.encode(blueprint), renews=renews))
        if renews:
            self.lose_executors(is_fault=False)

    def lose_executors(self, *, is_fault: bool = True) -> None:
        """Lose the executors and get new ones."""
        self.tell(ExecutorsLost(reason="killed", is_fault=is_fault))
        self._new_device()
        self.tell(ExecutorsReady(num_pages=NUM_PAGES))

    def request(self) -> Admit:
        """Some with a prefix that others have too, some that use adapters, salts, other tenants."""
        rng = self._rng
        self.num_requests += 1
        stem = np.random.default_rng(rng.randrange(4)).integers(10, VOCAB, rng.randrange(40))
        prompt = np.append(stem, np.random.default_rng(rng.randrange(10**9)).integers(10, VOCAB, rng.randrange(1, 40)))
        self.prompts.append(prompt.astype(np.int32))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 60), ignore_eos=rng.random() < 0.7, stop=("a text",),
            stop_token_ids=(11,) if rng.random() < 0.1 else (),
            grammar=Grammar("regex", SECRET) if rng.random() < 0.1 else None,
        )  # fmt: skip
        adapter = Adapter(str(rng.randrange(3)), "/adapters") if rng.random() < 0.2 else None
        return Admit(
            request_id=self.num_requests,
            token_ids=self.prompts[-1].tobytes(),
            params=params,
            priority=rng.randrange(2),
            cache_salt=SECRET if rng.random() < 0.2 else "",
            num_resumed=0,
            origin=Origin(tenant=f"tenant {rng.randrange(3)}"),
            parts=adapter.parts if adapter is not None else {},
        )

    def run(self, seconds: float, losses: int = 0) -> None:
        """Traffic of so many virtual seconds, more than the pool can hold, with aborts; then all come to their end."""
        ends_at, rng = self.now + seconds, self._rng
        lose_at = [self.now + seconds * (number + 1) / (losses + 1) for number in range(losses)]
        while self.now < ends_at:
            if rng.random() < 0.12 and self.scheduler.planner is not None and self.scheduler.planner.num_open < 24:
                self.tell(*(self.request() for _ in range(rng.randrange(1, 4))))
            if rng.random() < 0.02:
                self.tell(Abort(request_id=rng.randrange(max(1, self.num_requests - 10), self.num_requests + 1)))
            if lose_at and self.now >= lose_at[0]:
                lose_at.pop(0)
                self.lose_executors()
            if not self.finish_step():
                self.now += 0.03
        while self.finish_step():
            pass

    def written(self) -> list[Path]:
        """Files, when they are there."""
        if self.recorder._writing is not None:
            self.recorder._writing.join()
        return sorted(self.recorder.folder.glob("*.cbr"))
