"""The flight recorder's route as a part of the server."""

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Final

from engine.features.recording.engine import RecordingFeature
from server.extensions.recording.route import RecordingRoute
from server.run.extension import Extension, ServerParts

if TYPE_CHECKING:
    from engine.control.system import System

log = logging.getLogger(__name__)

NAME: Final = "recording"  # of the feature, and of what the card has of it


class RecordingExtension(Extension):
    """POST /debug/recording and SIGUSR2."""

    handlers = (RecordingRoute,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(RecordingRoute(parts.backend.operations, parts.backend.card.parts.get(NAME, b"").decode()))

    def describe(self, system: "System") -> dict[str, bytes]:
        """Return the folder of recordings, if there are some."""
        feature = system.features.get(NAME)
        return {NAME: str(feature.recorder.folder).encode()} if isinstance(feature, RecordingFeature) else {}

    def with_engine(self, system: "System") -> None:
        """Have SIGUSR2 write a file; if nothing is recorded it logs so, and ends nothing."""
        loop, feature = asyncio.get_running_loop(), system.features.get(NAME)
        if isinstance(feature, RecordingFeature):
            loop.add_signal_handler(signal.SIGUSR2, feature.recorder.write, "signal")
        else:
            loop.add_signal_handler(signal.SIGUSR2, log.warning, "SIGUSR2: nothing is recorded without storage.folder")


EXTENSION = RecordingExtension()
