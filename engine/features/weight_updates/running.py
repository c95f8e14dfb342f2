"""The weights of an ``LLM``: they are changed from any thread while other threads generate.

Owns: these calls.  Does not know: how a command is done.
"""

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.actors.feature import EngineFeature
from engine.features.weight_updates.engine import (
    Asked,
    Describe,
    PauseRows,
    RegainMemory,
    ReleaseMemory,
    ResumeRows,
    UpdateWeights,
    WeightsState,
)
from engine.features.weight_updates.memory import parts_of, place, write_tensors
from engine.features.weight_updates.messages import NAME, TAGS, Mode, Tag

Await = Callable[[Coroutine[Any, Any, bytes]], bytes]


class RunningWeights:
    """The weights of a running engine.  Every call returns the state after it, and raises RequestError or WeightsError.

    wait: runs a coroutine on the engine's loop."""

    def __init__(self, features: Mapping[str, EngineFeature], wait: Await) -> None:
        self._feature = features[NAME]
        self._wait = wait

    def update(
        self,
        weights: str | Path | int | Mapping[str, Any],
        *,
        version: str = "",
        digest: str = "",
        mode: Mode | None = None,
        max_versions: int | None = None,
    ) -> WeightsState:
        """Compute with other weights of the same model, from one step on.

        weights: a checkpoint's directory; a safetensors file with the tensors that differ, whole or as a sparse delta;
        the descriptor of memory with the same; or tensors by their names in the checkpoint.
        version: its name in answers; '' for the number of the update.  digest: that the weights must have; of a file
        also its SHA-256.
        mode: what happens to running rows ('finish', 'keep', 'retract', 'abort'); None for that of the pause, or
        'retract'.  max_versions: requests end that would have tokens of more versions; 0 for no limit, None for
        scheduler.max_weight_versions."""
        if isinstance(weights, Mapping):
            memory = write_tensors(parts_of(weights), {})
            try:
                return self.update(memory, version=version, digest=digest, mode=mode, max_versions=max_versions)
            finally:
                os.close(memory)
        directory = place(weights) if isinstance(weights, int) else weights
        return self._do(
            UpdateWeights(
                directory=str(directory), version=version, digest=digest, mode=mode, max_versions=max_versions
            )
        )

    def release(self, *tags: Tag) -> WeightsState:
        """Give memory back ('weights', 'kv_cache'; both without an argument), and start no step until ``regain``."""
        return self._do(ReleaseMemory(tags=tags or TAGS))

    def regain(self, *tags: Tag) -> WeightsState:
        """Take memory again; requests go on when none is missing.  An update does so for weights."""
        return self._do(RegainMemory(tags=tags or TAGS))

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
