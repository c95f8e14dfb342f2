"""The weights of an ``LLM``: they are changed from any thread while other threads generate.

Owns: these calls.  Does not know: how a command is done.
"""

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.actors.feature import EngineFeature
from engine.features.weight_updates.engine import (
    Asked,
    Describe,
    PauseRows,
    ResumeRows,
    UpdateWeights,
    WeightsState,
)
from engine.features.weight_updates.messages import NAME, Mode

Await = Callable[[Coroutine[Any, Any, bytes]], bytes]


class RunningWeights:
    """The weights of a running engine.  Every call returns the state after it, and raises RequestError or WeightsError.

    wait: runs a coroutine on the engine's loop."""

    def __init__(self, features: Mapping[str, EngineFeature], wait: Await) -> None:
        self._feature = features[NAME]
        self._wait = wait

    def update(
        self,
        directory: str | Path,
        *,
        version: str = "",
        digest: str = "",
        mode: Mode | None = None,
        max_versions: int = 0,
    ) -> WeightsState:
        """Compute with the weights of another checkpoint of the same model, from one step on.

        version: its name in answers; '' for the number of the update.  digest: the fingerprint that it must have.
        mode: what happens to running rows ('finish', 'keep', 'retract', 'abort'); None for that of the pause, or
        'retract'.  max_versions: requests end that would have tokens of more versions; 0 for no limit."""
        return self._do(
            UpdateWeights(
                directory=str(directory), version=version, digest=digest, mode=mode, max_versions=max_versions
            )
        )

    def pause(self, mode: Mode = "keep") -> WeightsState:
        """Start no step until ``resume``; return when running rows have finished, stand still, or are retracted."""
        return self._do(PauseRows(mode=mode))

    def resume(self) -> WeightsState:
        """Go on after a pause."""
        return self._do(ResumeRows())

    @property
    def state(self) -> WeightsState:
        """The present state."""
        return self._do(Describe())

    def _do(self, asked: Asked) -> WeightsState:
        answer = self._wait(self._feature.operate(msgspec.json.encode(asked).decode()))
        return msgspec.json.decode(answer, type=WeightsState)
