"""States on a rank: the memory of snapshots, and the copies between it and the running states of rows.

Owns: that memory.  Does not know: what a state is, which sequence a slot belongs to.
Copies are queued in the order of the steps, like everything that a step does on the device.
"""

import logging
from dataclasses import replace

import numpy as np

from engine.execution.features import RankContext, RankFeature
from engine.execution.launched_step import LaunchedStep
from engine.execution.needs import Needs
from engine.features.states.messages import copies_of
from engine.features.states.slots import PAGES_PER_SLOT, num_snapshots
from engine.layers.states import RecurrentStates
from engine.messages import Step

log = logging.getLogger(__name__)


class StatesRank(RankFeature):
    """The snapshots of one rank.  states: those of its rows."""

    def __init__(self, context: RankContext, states: RecurrentStates) -> None:
        self._running = states.data
        self._max_running = context.config.scheduler.max_running
        self._rank = context.comm.rank
        self._state_bytes = states.data[0].nbytes
        self.page_bytes = -(-self._state_bytes // PAGES_PER_SLOT)
        self._snapshots = states.data[:0]

    def needs(self, needs: Needs) -> Needs:
        """Return the needs with a snapshot for each running row; the others come with the pool's pages.

        On a GPU those are in what the engine measures after ``prepare``."""
        if self._running.device.type != "cpu":
            return needs
        own = ("snapshots of states", self._max_running * self._state_bytes)
        return replace(needs, feature_bytes=(*needs.feature_bytes, own))

    def prepare(self, num_pages: int) -> None:
        """Allocate the snapshots that go with a pool."""
        self._snapshots = self._running[:0]
        if not num_pages:
            return
        count = num_snapshots(num_pages, self._max_running)
        self._snapshots = self._running.new_empty((count, *self._running.shape[1:]))
        log.info("rank %d snapshots of states: %d of %.2f MB", self._rank, count, self._state_bytes / 1e6)

    def apply(self, step: Step) -> Step:
        """Give rows the states of snapshots, and take snapshots of rows that may go back to them."""
        copies = copies_of(step)
        for source, target in _pairs(copies.before):
            self._running[target].copy_(self._snapshots[source - self._max_running])
        self._take(copies.aside)
        return step

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Take snapshots of rows, behind the step."""
        self._take(copies_of(step).after)

    def _take(self, copies: bytes) -> None:
        for source, target in _pairs(copies):
            self._snapshots[target - self._max_running].copy_(self._running[source])


def _pairs(copies: bytes) -> list[tuple[int, int]]:
    sources, targets = np.frombuffer(copies, dtype=np.int32).reshape(2, -1).tolist()
    return [*zip(sources, targets, strict=True)]


def rank_feature(context: RankContext) -> StatesRank | None:
    """Return the snapshots, or None for a model without states."""
    return None if context.states is None else StatesRank(context, context.states)
