"""A contender of a race in this process: what stands in tests for a process of its own."""

from typing import Any

from engine.startup.measurement import Measurement, RaceEntry
from engine.startup.race_process import RaceAnswer


class InThisProcess:
    """What a process does for an entry, here, so that the backends move this process's clock."""

    def __init__(self, entry: RaceEntry, **doubles: Any) -> None:
        self._entry, self._doubles = entry, doubles
        self._problem = ""

    def is_compiled(self, timeout_s: float) -> bool:
        try:
            self._measurement = Measurement(self._entry, **self._doubles)
            self._measurement.compile()
        except Exception as error:
            self._problem = str(error)
        return True

    def measured(self, timeout_s: float) -> RaceAnswer:
        return RaceAnswer({}, self._problem) if self._problem else RaceAnswer(self._measurement.run())

    def end(self) -> None:
        pass
