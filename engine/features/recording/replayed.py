"""A scheduler that replays a recording: it gets recorded turns and makes the same plans again.

Owns: a scheduler without peers, and its clock.  Does not know: where turns come from, what reads the plans.
The recorder has one that lags behind by the length of its ring; a replay begins with a copy of that one's state.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.actors.scheduler import Scheduler
from engine.features.recording.blueprint import Blueprint
from engine.features.recording.turns import Turn, plan_digest
from engine.messages import Failed, FetchPages, Step, Tokens
from engine.plugins.deciders import policy_choice
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.scheduling.planner import Planner


class ReplayClock:
    """A clock that returns the recorded readings; the last one again when there are no more."""

    def __init__(self) -> None:
        self.now = 0.0
        self._readings: deque[float] = deque()

    def load(self, readings: bytes) -> None:
        """Set the readings of the turn that begins, float64[n]."""
        self._readings = deque(np.frombuffer(readings, dtype=np.float64).tolist())

    def __call__(self) -> float:
        """Return the next reading, in seconds."""
        if self._readings:
            self.now = self._readings.popleft()
        return self.now


class Sink:
    """A link to a function."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put = put


class ReplayedScheduler(Scheduler):
    """A scheduler as the blueprint describes it.

    plans: plans of the last turn.  said: messages of the last turn for the tokenizer.
    on_plan: called with each plan when it is made.  blueprint: the one in force.  clock: the planner's."""

    log = logging.getLogger(f"{__name__}.silent")
    log.disabled = True  # the engine has logged it all when it happened
    # All state of its own.
    OWN = ("clock", "policy", "overlap_depth", "is_renewed", "_planner", "_results", "_num_pages", "_is_ready",
           "_last_stats")  # fmt: skip

    def __init__(self, blueprint: Blueprint, plugins: Plugins) -> None:
        self.plans: list[Step | FetchPages] = []
        self.said: list[Tokens | Failed] = []
        self.on_plan: Callable[[Step | FetchPages], None] | None = None
        self.clock = ReplayClock()
        self.num_ranks = blueprint.limits.num_ranks
        self.policy = blueprint.policy(plugins)
        self.blueprint = blueprint
        self._plugins = plugins
        nobody = Sink(lambda message: None)
        super().__init__(
            capacity=1,
            overlap_depth=blueprint.overlap_depth,
            new_planner=self._build,
            executors=[Sink(self._note_plan), *[nobody] * (self.num_ranks - 1)],
            explain=nobody.put,
            tokenizer=Sink(lambda message: self.said.append(message)),
            ingress=nobody,
            observers=Observers(Plugins({}), {}, page_size=blueprint.limits.page_size),
        )

    @property
    def is_ready(self) -> bool:
        """Whether the executors are ready."""
        return self._is_ready

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool; 0 before there was one."""
        return self._num_pages

    def play(self, turn: Turn) -> bytes:
        """Handle a turn.  Return the digests of its plans.  Raises the scheduler's errors."""
        self.clock.load(turn.readings)
        self.plans, self.said = [], []
        if turn.change is not None:
            self._change(turn.change, renews=turn.renews)
        self.is_renewed |= turn.renews
        for message in turn.messages:
            self.handle(message)
        if turn.messages:
            self.flush()
        return b"".join(map(plan_digest, self.plans))

    def _change(self, blueprint: Blueprint, *, renews: bool) -> None:
        """Change the blueprint as ``Changeover`` does."""
        plugins = blueprint.plugins()
        if policy_choice(plugins, blueprint.config) != policy_choice(self._plugins, self.blueprint.config):
            self.policy = blueprint.policy(plugins)
        self.blueprint, self._plugins = blueprint, plugins
        self.overlap_depth = blueprint.overlap_depth
        if not renews and self._planner is not None:
            num_pages = self._planner.requests.limits.num_pages
            self._planner.retune(replace(blueprint.limits, num_pages=num_pages, record_events=False), self.policy)

    def _build(self, num_pages: int) -> Planner:
        return self.blueprint.planner(self._plugins, num_pages, self.clock, self.policy)

    def _note_plan(self, plan: Step | FetchPages) -> None:
        self.plans.append(plan)
        if self.on_plan is not None:
            self.on_plan(plan)

    def state(self) -> dict[str, Any]:
        """Return everything that decides the next plans, without a copy: play nothing while it is read."""
        return {name: getattr(self, name) for name in self.OWN}

    def begin_with(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state`` returned."""
        for name in self.OWN:
            setattr(self, name, state[name])
