"""States on a rank: the memory of snapshots, here and on the host, and the copies between it and the states of rows.

Owns: that memory.  Does not know: what a state is, which sequence a slot belongs to.
Copies are queued in the order of the steps, like everything that a step does on the device.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.execution.device import fair_share, host_place
from engine.execution.features import RankContext, RankFeature
from engine.execution.launched_step import LaunchedStep
from engine.execution.needs import Needs
from engine.features.states.messages import ARRIVING, copies_of
from engine.features.states.slots import PAGES_PER_SLOT, num_for_rows, num_on_host, num_snapshots
from engine.host.memory import available_bytes
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates
from engine.messages import Step
from engine.startup.memory import MAX_HOST_SHARE, require_room
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)


class StatesRank(RankFeature):
    """The snapshots of one rank.  states: those of its rows."""

    order = 11  # a state that comes from a store is there

    def __init__(self, context: RankContext, states: RecurrentStates) -> None:
        self._states = states
        states.slot = self._slot
        self._running = states.data
        self._max_running = context.config.scheduler.max_running
        self._num_for_rows = num_for_rows(context.config)
        self._comm = context.comm
        self._num_host_pages: int = getattr(context.config.kv, "num_host_pages", 0)  # of an optional folder
        self._num_on_host = num_on_host(self._num_host_pages)
        self._state_bytes = states.data[0].nbytes
        self.page_bytes = -(-self._state_bytes // PAGES_PER_SLOT)
        self._snapshots = self._on_host = states.data[:0]

    def needs(self, needs: Needs) -> Needs:
        """Return the needs with the snapshots for running rows, and those beside host pages; the others come with the
        pool's pages.

        On a GPU the first are in what the engine measures after ``prepare``, and the second elsewhere."""
        if self._running.device.type != "cpu":
            return needs
        own = ("snapshots of states", (self._num_for_rows + self._num_on_host) * self._state_bytes)
        return replace(needs, feature_bytes=(*needs.feature_bytes, own))

    def prepare(self, num_pages: int) -> None:
        """Allocate the snapshots that go with a pool."""
        self._snapshots = self._running[:0]
        if not num_pages:
            return
        count = num_snapshots(num_pages, self._num_for_rows)
        self._snapshots = self._running.new_empty((count, *self._running.shape[1:]))
        log.info(
            "rank %d snapshots of states: %d of %.2f MB, %d of them for rows",
            self._comm.rank,
            count,
            self._state_bytes / 1e6,
            self._num_for_rows,
        )

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Allocate the snapshots in host memory.  Raises ConfigError if there is none."""
        size, on_cpu = self._num_on_host * self._state_bytes, self._running.device.type == "cpu"
        if not size:
            return
        asked = f"kv.num_host_pages={self._num_host_pages}: {size / 1e9:.1f} GB of host memory for recurrent states"
        if not on_cpu:  # there the pool has left room for them
            available = fair_share(available_bytes(), host_place(), self._comm, self._running.device)
            require_room(asked, self._num_on_host, self._state_bytes, available, MAX_HOST_SHARE, Needs())
        try:
            shape = (self._num_on_host, *self._running.shape[1:])
            self._on_host = torch.empty(shape, dtype=self._running.dtype, pin_memory=not on_cpu)
        except (MemoryError, RuntimeError) as error:  # torch raises these when it cannot allocate
            raise ConfigError(f"{asked} cannot be allocated ({error}); lower it") from None
        log.info("rank %d snapshots of states on the host: %d, %.1f MB", self._comm.rank, self._num_on_host, size / 1e6)

    def page_memory(self) -> Sequence[Tensor]:
        """Return the snapshots on the device."""
        return (self._snapshots,)

    def apply(self, step: Step) -> Step:
        """Make the copies before the step."""
        self._copy(copies_of(step).before)
        return step

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Take snapshots of rows, behind the step."""
        self._copy(copies_of(step).after)

    def _copy(self, copies: bytes) -> None:
        """Copy slots in the order of the device's work, also to and from host memory, which the host never touches."""
        for source, target in _pairs(copies):
            state = self._slot(source) if source >= 0 else self._states.arrived.pop(ARRIVING - source)
            self._slot(target).copy_(state, non_blocking=True)

    def _slot(self, slot: int) -> Tensor:
        for memory in (self._running[: self._max_running], self._snapshots, self._on_host):
            if slot < len(memory):
                return memory[slot]
            slot -= len(memory)
        raise AssertionError(f"no slot is {slot} after the last one")


def _pairs(copies: bytes) -> list[tuple[int, int]]:
    sources, targets = np.frombuffer(copies, dtype=np.int32).reshape(2, -1).tolist()
    return [*zip(sources, targets, strict=True)]


def rank_feature(context: RankContext) -> StatesRank | None:
    """Return the snapshots, or None for a model without states."""
    return None if context.states is None else StatesRank(context, context.states)
