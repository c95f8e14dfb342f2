"""Requests through a planner in virtual time: a device whose steps take what a cost model says.

Owns: virtual time, and what came out when.  Does not know: tensors, wall time.
A step takes BASE_S + DECODE_S for each row that decodes + PREFILL_S for each prompt token.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine.features.host_tier.planner import HostTierPlanner
from engine.features.itl_target.planner import TargetPlanner
from engine.features.shared_prefix.planner import SharedPrefixPlanner
from engine.messages import Admission, Admit, Step, Tokens
from engine.plugins.hookspecs import EvictionContext, PolicyContext
from engine.plugins.manager import Plugins
from engine.scheduling.feature import NewFeature
from engine.scheduling.planner import Planner
from engine.scheduling.playback import Playback
from engine.scheduling.rows import PlannerLimits
from engine.types.params import SamplingParams
from engine.types.prompt import Origin

EOS, TOKEN = 2, 7
PAGE_SIZE = 16
DEPTH = 2
BASE_S, DECODE_S, PREFILL_S = 5e-3, 0.02e-3, 0.05e-3


def new_planner(
    clock: Callable[[], float], policy: str = "priority", features: Sequence[NewFeature] = (), **limits: Any
) -> Planner:
    """The server's defaults, where ``limits`` does not say otherwise."""
    given = {"max_running": 64, "max_step_tokens": 2048, "prefill_chunk": 512, "max_len": 4096, **limits}
    hosts = [HostTierPlanner] if given.get("num_host_pages") else []
    hook = Plugins({"eviction": "lru", "policy": policy}).hook
    return Planner(
        PlannerLimits(page_size=PAGE_SIZE, eos_token_ids=(EOS,), **given),
        hook.callboard_eviction_strategy(context=EvictionContext(PAGE_SIZE, given["num_pages"])),
        hook.callboard_scheduling_policy(context=PolicyContext(given["max_running"], PAGE_SIZE)),
        clock,
        features=[SharedPrefixPlanner, TargetPlanner, *hosts, *features],
    )


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(10, 30_000, count, dtype=np.int32)


def num_sampled(step: Step) -> int:
    return len(step.decode_rows) // 4 + step.prefill_samples.count(1)


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Request:
    """A request.  at: virtual seconds.  output: tokens until it samples EOS."""

    at: float
    prompt: np.ndarray
    output: int
    max_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Outcome:
    """The figures of a simulation.  Per request: ``first_at``.  gaps: seconds between two tokens of a request."""

    first_at: np.ndarray
    cached: np.ndarray
    gaps: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    num_ended: int = 0
    num_prefilled: int = 0  # prompt tokens computed, again after a retraction too
    seconds: float = 0.0
    running_s: float = 0.0  # integrals over time
    used_s: float = 0.0


class Simulation:
    """A planner and a device with a cost model; two steps in flight, as in the server.

    jitter: standard deviation of a step's time, as a share of it; drawn from a fixed seed."""

    def __init__(self, requests: list[Request], policy: str = "priority", jitter: float = 0.0, **limits: Any) -> None:
        self._jitter = jitter
        self._rng = np.random.default_rng(0)
        self.requests = requests
        self._arriving = deque(enumerate(requests))
        planner = partial(new_planner, policy=policy, **limits)
        self.playback = Playback(planner, self._script, self._seconds, depth=DEPTH)
        self.planner = self.playback.planner
        self._num_pages: int = limits["num_pages"]
        self._last_at = np.full(len(requests), np.nan)
        self.outcome = Outcome(np.full(len(requests), np.nan), np.full(len(requests), np.nan))

    def run(self, until: float = np.inf) -> Outcome:
        """Until all have ended, or to a point in time."""
        outcome, playback = self.outcome, self.playback
        for due in playback.times(self._arrive):
            if due > until:
                break
            stats = self.planner.stats()
            outcome.running_s += stats.running * (due - playback.now)
            outcome.used_s += stats.pages_used / self._num_pages * (due - playback.now)
            if playback.advance(due):
                self._read()
        outcome.seconds = playback.now
        return outcome

    def _arrive(self) -> float:
        while self._arriving and self._arriving[0][1].at <= self.playback.now:
            self._admit(*self._arriving.popleft())
        return self._arriving[0][1].at if self._arriving else np.inf

    def _admit(self, request_id: int, request: Request) -> None:
        # The seed is the number of the request, by which its script is found.
        params = SamplingParams(max_tokens=request.max_tokens, seed=request_id)
        origin = Origin(tenant=request.tenant)
        self.planner.admit(
            Admit(request_id=request_id, token_ids=request.prompt.tobytes(), params=params, origin=origin)
        )

    def _seconds(self, step: Step) -> float:
        num_prompt_tokens = int(np.frombuffer(step.prefill_lengths, dtype=np.int32).sum())
        self.outcome.num_prefilled += num_prompt_tokens
        seconds = BASE_S + DECODE_S * (len(step.decode_rows) // 4) + PREFILL_S * num_prompt_tokens
        return seconds * float(self._rng.lognormal(0.0, self._jitter))

    def _script(self, admission: Admission) -> np.ndarray:
        request = self.requests[admission.params.seed or 0]
        num_sampled = min(request.output - 1, request.max_tokens)  # before EOS
        return np.full(admission.num_prompt_tokens + num_sampled, TOKEN, dtype=np.int32)

    def _read(self) -> None:
        outcome = self.outcome
        for message in self.planner.outbox:
            assert isinstance(message, Tokens)
            ids = np.frombuffer(message.request_ids, dtype=np.int64)
            gaps = self.playback.now - self._last_at[ids]
            outcome.gaps.append(gaps[~np.isnan(gaps)])
            outcome.first_at[ids[np.isnan(gaps)]] = self.playback.now
            self._last_at[ids] = self.playback.now
            outcome.num_tokens += len(ids)
            outcome.num_ended += len(ids) - message.finishes.count(0)
            for request_id, (num_cached, _) in message.cached_tokens.items():
                outcome.cached[request_id] = num_cached
        self.planner.outbox.clear()
        self.planner.finished.clear()

    def ttft_ms(self, percent: float, tenants: Container[str] | None = None) -> float:
        """Return a percentile over the requests with a first token, of these tenants if any are given."""
        waits = [
            first - request.at
            for first, request in zip(self.outcome.first_at, self.requests, strict=True)
            if not np.isnan(first) and (tenants is None or request.tenant in tenants)
        ]
        return float(np.percentile(waits, percent) * 1000)

    def itl_ms(self, percent: float) -> float:
        return float(np.percentile(np.concatenate(self.outcome.gaps), percent) * 1000)


def poisson(rng: np.random.Generator, per_s: float, seconds: float) -> np.ndarray:
    """Times of arrival."""
    return np.cumsum(rng.exponential(1 / per_s, int(per_s * seconds)))
