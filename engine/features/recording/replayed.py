"""A scheduler that replays a recording: it gets recorded turns and makes the same plans again.

Owns: a scheduler without peers, and its clock.  Does not know: where turns come from, what reads the plans.
The recorder has one that lags behind by the length of its ring; a replay begins with a copy of that one's state.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.actors.scheduler import Scheduler
from engine.features.recording.turns import Turn, plan_digest
from engine.messages import Failed, FeatureRequest, Step, Tokens
from engine.plugins.blueprint import Blueprint, BlueprintPlanners
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers


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
    on_plan: called with each plan when it is made.  clock: the planner's."""

    log = logging.getLogger(f"{__name__}.silent")
    log.disabled = True  # the engine has logged it all when it happened
    # All state of its own.
    OWN = ("clock", "_renews", "_planner", "_results", "_num_pages", "_is_ready", "_last_stats")

    def __init__(self, blueprint: Blueprint, plugins: Plugins) -> None:
        self.plans: list[Step | FeatureRequest] = []
        self.said: list[Tokens | Failed] = []
        self.on_plan: Callable[[Step | FeatureRequest], None] | None = None
        self.clock = ReplayClock()
        self.num_ranks = blueprint.limits.num_ranks
        self._planners = BlueprintPlanners(blueprint, plugins, self.clock)
        nobody = Sink(lambda message: None)
        super().__init__(
            capacity=1,
            source=self._planners,
            executors=[Sink(self._note_plan), *[nobody] * (self.num_ranks - 1)],
            explain=nobody.put,
            tokenizer=Sink(lambda message: self.said.append(message)),
            ingress=nobody,
            observers=Observers(Plugins({}), {}, page_size=blueprint.limits.page_size),
        )

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint in force."""
        return self._planners.blueprint

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
        for message in turn.messages:
            self.handle(message)
        if turn.messages:
            self.flush()
        return b"".join(map(plan_digest, self.plans))

    def _note_plan(self, plan: Step | FeatureRequest) -> None:
        self.plans.append(plan)
        if self.on_plan is not None:
            self.on_plan(plan)

    def state(self) -> dict[str, Any]:
        """Return everything that decides the next plans, without a copy: play nothing while it is read."""
        return {"policy": self._planners.policy, **{name: getattr(self, name) for name in self.OWN}}

    def begin_with(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state`` returned."""
        for name in self.OWN:
            setattr(self, name, state[name])
        self._planners.go_on_with(state["policy"], self.clock)
