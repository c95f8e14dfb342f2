"""A contender of a race in this process: what stands in tests for a process of its own."""

from collections.abc import Sequence
from typing import Any

from engine.startup.measurement import RaceEntry
from engine.startup.race_process import RaceAnswer, RaceTrial


class InThisProcess:
    """A race's process for entries, but in this one, so that the backends move this process's clock."""

    def __init__(self, entries: Sequence[RaceEntry], **doubles: Any) -> None:
        self._trials = [RaceTrial(entry, **doubles) for entry in entries]

    def compiled(self, timeout_s: float) -> Sequence[RaceAnswer]:
        return [trial.compiled() for trial in self._trials]

    def measured(self, number: int, timeout_s: float) -> RaceAnswer:
        return self._trials[number].measured()

    def end(self) -> None:
        pass
