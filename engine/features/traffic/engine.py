"""Traces of traffic as a part of an engine.

Owns: when an engine records its traffic.  Does not know: files, what a line of a trace has.
"""

from typing import TypeVar

from engine.actors.actor import Link
from engine.actors.feature import EngineContext, EngineFeature
from engine.config import Config
from engine.features.traffic.recorder import TraceRecorder
from engine.features.traffic.settings import TraceSettings
from engine.scheduling.rows import PlannerLimits

M = TypeVar("M")


class TrafficFeature(EngineFeature):
    """A recorder of one engine's traffic."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder

    def tap(self, link: Link[M]) -> Link[M]:
        """Return a link whose messages are recorded."""
        return self.recorder.tap(link)

    def plans(self, limits: PlannerLimits, config: Config) -> None:
        """Begin a trace."""
        self.recorder.begin(limits, config)

    def close(self) -> None:
        """Write the rest."""
        self.recorder.close()


def engine_feature(context: EngineContext) -> TrafficFeature | None:
    """Return the feature; None if no space is set aside for traces.  Raises ConfigError for the folder."""
    storage = context.config.storage
    if not TraceSettings.read(storage).trace_mb:
        return None
    recorder = TraceRecorder(storage, context.model_name, context.clock)
    context.observers.add(recorder, "storage.trace_mb")
    return TrafficFeature(recorder)
