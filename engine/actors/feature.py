"""The hooks of optional parts of an engine, which go on when its settings change, and their context.

Owns: the hooks.  Does not know: which features there are (``engine/control/features.py`` finds them), the system.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.actors.actor import Link
from engine.actors.scheduler import Scheduler
from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.scheduling.proposer import DraftModel
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import RequestError

M = TypeVar("M")
NewScheduler = Callable[..., Scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """An engine with one configuration.

    limits: those of its planners, without a pool.  max_len: longest sequence.  clock: seconds, that of planners."""

    config: Config
    spec: ModelSpec
    model_name: str
    max_len: int
    limits: PlannerLimits
    plugins: Plugins
    draft: DraftModel | None
    observers: Observers
    clock: Callable[[], float]


class EngineFeature:
    """An optional part of one engine.  A subclass overrides the hooks that it needs.

    about: what extensions of the server must know of it; '' for nothing."""

    about = ""

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the clock of planners, or one in its place."""
        return clock

    def scheduler(self, build: NewScheduler) -> NewScheduler:
        """Return the constructor of the scheduler, or one in its place."""
        return build

    def tap(self, link: Link[M]) -> Link[M]:
        """Return a link from or to the scheduler, or one in its place."""
        return link

    def plans(self, limits: PlannerLimits, config: Config) -> None:
        """Called before a planner is built, and when the present one goes on with other settings."""

    def changed(self, context: EngineContext) -> None:
        """Called when the engine has another configuration."""

    async def operate(self, text: str) -> None:
        """Do an operator's operation.  Raises RequestError if it cannot be done."""
        raise RequestError("there is no such operation", status=404, code="no_operation")

    def close(self) -> None:
        """Finish; the actors have ended.  It is called on a thread and may wait for a disk."""
