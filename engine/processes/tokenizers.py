"""Tokenizers in processes of their own, as the pool starts them.

Owns: what each of them is told.  Does not know: how a process is held, restarts, requests.
"""

import sys

from engine.actors.tenure import Reports
from engine.config import Config
from engine.errors import ConfigError
from engine.logs import LogSettings
from engine.messages import TokenizerInbox, TokenizerPoolInbox, TokenizerWord
from engine.processes.assignment import TokenizerAssignment
from engine.processes.member import BEATS, STEPS_BEHIND, ProcessMember


class ProcessTokenizers:
    """Starts them.  config: with the model's path resolved.  capacity: of a mailbox.  module: what they run."""

    def __init__(self, *, config: Config, capacity: int, module: str = "engine.processes.tokenizer") -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.tokenizers: processes are watched in Linux's ways; use 0 here")
        self._module = module
        self._assignment = TokenizerAssignment(
            config=config,
            # Of the link as well, which holds what the mailbox has not taken yet.
            capacity=capacity + STEPS_BEHIND,
            heartbeat_s=config.placement.silence_timeout_s / BEATS,
            logs=LogSettings.here(),
        )

    def start(
        self, name: str, number: int, reports: Reports[TokenizerWord]
    ) -> ProcessMember[TokenizerWord, TokenizerInbox]:
        """Start one.  Raises ConfigError or LinkError if its link cannot be made."""
        return ProcessMember(
            name,
            number,
            self._assignment,
            reports,
            module=self._module,
            where=self._assignment.config.placement.link,
            accepts=TokenizerPoolInbox,
            capacity=self._assignment.capacity,
        )
