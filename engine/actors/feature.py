"""The hooks of optional parts of an engine, which go on when its settings change, and their context.

Owns: the hooks.  Does not know: which features there are (``engine/control/features.py`` finds them), the system.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.actors.actor import Link
from engine.actors.scheduler import Scheduler
from engine.config import Config
from engine.plugins.blueprint import Blueprint
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import RequestError

M = TypeVar("M")
NewScheduler = Callable[..., Scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """An engine whose actors are built next.

    blueprint: of its planners, with the plugins.  clock: seconds, that of planners."""

    config: Config
    model_name: str
    blueprint: Blueprint
    plugins: Plugins
    observers: Observers
    clock: Callable[[], float]


class EngineFeature:
    """An optional part of one engine.  A subclass overrides the hooks that it needs."""

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

    async def operate(self, text: str) -> bytes:
        """Do an operator's operation.  Return its outcome.  Raises RequestError if it cannot be done."""
        raise RequestError("there is no such operation", status=404, code="no_operation")

    async def rest(self, tags: tuple[str, ...]) -> None:
        """Give memory back of the kinds that ``tags`` name, so that no step starts.  Raises RequestError."""

    async def rise(self, tags: tuple[str, ...]) -> None:
        """Take memory again.  Raises RequestError."""

    def close(self) -> None:
        """Finish; the actors have ended.  It is called on a thread and may wait for a disk."""
