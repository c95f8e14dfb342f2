"""The front in a process of its own, as its desk starts it.

Owns: what it is told.  Does not know: what it serves; it is the server's, and only its module's name is known here.
"""

import sys

from engine.actors.front_desk import FrontCommand, FrontTold
from engine.actors.tenure import Reports
from engine.config import Config
from engine.errors import ConfigError
from engine.logs import LogSettings
from engine.messages import FrontDeskInbox, FrontWord, Handover
from engine.processes.assignment import FrontAssignment
from engine.processes.member import BEATS, END_TIMEOUT_S, STEPS_BEHIND, ProcessMember


class ProcessFronts:
    """Starts one after the other.  config: with the model's path resolved.  capacity: of its ingress's mailbox."""

    def __init__(self, *, config: Config, command: FrontCommand, max_len: int, vocab_size: int, capacity: int) -> None:
        if sys.platform != "linux":
            raise ConfigError("placement.ingress: processes are watched in Linux's ways; use 'inline' here")
        self._config = config
        self._command = command
        self._max_len = max_len
        self._vocab_size = vocab_size
        # Of the link as well, which holds what the mailbox has not taken yet.
        self._capacity = capacity + STEPS_BEHIND

    def start(self, name: str, handover: Handover, reports: Reports[FrontWord]) -> ProcessMember[FrontWord, FrontTold]:
        """Start one.  Raises ConfigError or LinkError if its link cannot be made."""
        config, listener = self._config, self._command.listener
        assignment = FrontAssignment(
            config=config,
            max_len=self._max_len,
            vocab_size=self._vocab_size,
            has_tokenizers=config.placement.tokenizers > 0,
            listener=listener,
            capacity=self._capacity,
            heartbeat_s=config.placement.silence_timeout_s / BEATS,
            logs=LogSettings.here(),
            handover=handover,
        )
        return ProcessMember(
            name,
            0,
            assignment,
            reports,
            module=self._command.module,
            where=config.placement.link,
            accepts=FrontDeskInbox,
            capacity=self._capacity,
            keep=(listener,),
            # Its last clients may read as slowly as any.
            end_timeout_s=config.server.client_timeout_s + END_TIMEOUT_S,
        )
