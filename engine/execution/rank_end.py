"""The end of a rank: after its last step, or after a failure.

Owns: the order in which a rank gives up what it has.  Does not know: steps, why a rank has failed.
"""

import logging
from collections.abc import Sequence

from engine.execution.captured_steps import Captures
from engine.execution.features import RankFeature
from engine.host.timeouts import returns_within
from engine.layers.comm import Comm

log = logging.getLogger(__name__)

# Less than placement.silence_timeout_s is by default: the event loop of an executor that has failed waits for this.
LEAVE_TIMEOUT_S = 5.0


class RankEnd:
    """The parts of a rank that must be ended.  graphs: the captures of the device."""

    def __init__(self, comm: Comm, graphs: Captures, features: Sequence[RankFeature]) -> None:
        self._comm = comm
        self._graphs = graphs
        self._features = features

    def close(self) -> None:
        """Let the features finish their work next to the steps."""
        for feature in self._features:
            feature.close()

    def leave(self) -> None:
        """Give up the communicator, on a thread that is left behind if a library does not return."""
        rank = self._comm.rank
        if not returns_within(LEAVE_TIMEOUT_S, self._leave, f"rank {rank} leaves"):
            log.error("rank %d has not left its group after %g s; its process must end", rank, LEAVE_TIMEOUT_S)

    def _leave(self) -> None:
        for feature in self._features:
            feature.leave()
        # Graphs first, whatever refers to them: NCCL frees no communicator while one holds a collective of it.
        for part in (self._graphs.discard, self._comm.close):
            try:
                part()
            except Exception:
                log.exception("rank %d has failed, and then failed to leave its group", self._comm.rank)
