"""The flight recorder's route and ``callboard replay`` as a part of the server."""

import argparse
import sys

from engine.config import Config
from server.arguments import add_command, log_arguments
from server.extensions.recording.replay import add_replay_arguments, replay
from server.extensions.recording.route import RecordingRoute
from server.run.extension import Extension, ServerParts


class RecordingExtension(Extension):
    """POST /debug/recording, and the command that replays a recording."""

    handlers = (RecordingRoute,)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(RecordingRoute(parts.backend.operations, parts.backend.card.recordings))

    def add_commands(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        words = "step through a recording of the scheduler"
        add_replay_arguments(add_command(commands, "replay", _replay, words, log_arguments("warning")))


def _replay(parsed: argparse.Namespace, config: Config) -> None:
    sys.exit(replay(parsed))


EXTENSION = RecordingExtension()
