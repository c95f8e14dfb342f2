"""The flight recorder as a part of an engine.

Owns: when an engine has a recorder.  Does not know: turns, files, HTTP.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from engine.actors.feature import EngineContext, EngineFeature, NewScheduler
from engine.features.recording.recorder import RecordedScheduler, Recorder
from engine.features.recording.settings import RecordingSettings
from engine.types.errors import RequestError

WAITED_S: Final = 30.0  # wait for a request's first step after which a recording is written


class RecordingFeature(EngineFeature):
    """A recorder of one engine's scheduler."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return a clock whose readings are recorded."""
        return self.recorder.clock

    def scheduler(self, build: NewScheduler) -> NewScheduler:
        """Return the constructor of a scheduler whose turns are recorded."""
        return partial(RecordedScheduler, recorder=self.recorder)

    async def operate(self, text: str) -> bytes:
        """Write a file of this name.  Raises RequestError (507) if it is not written."""
        # A client that leaves cancels this task, but not the write on the recorder's thread.
        written = asyncio.wrap_future(self.recorder.write("asked", text))
        if reason := await asyncio.shield(written):
            status = HTTPStatus.INSUFFICIENT_STORAGE
            raise RequestError(f"the recording is not written: {reason}", status=status, code="recording_failed")
        return b""


def engine_feature(context: EngineContext) -> RecordingFeature | None:
    """Return the feature; None without a folder for recordings."""
    storage, settings = context.config.storage, RecordingSettings.of(context.config)
    if not storage.folder or not settings.recording_mb:
        return None
    recorder = Recorder(
        context.blueprint,
        context.plugins,
        folder=Path(storage.folder, "recordings"),
        limit_bytes=settings.recording_mb << 20,
        prompts=settings.recording_prompts,
        waited_s=context.config.limits.first_token_timeout_s or WAITED_S,
        clock=context.clock,
    )
    return RecordingFeature(recorder)
