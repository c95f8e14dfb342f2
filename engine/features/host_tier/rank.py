"""The host tier on a rank: host memory for pages, and copies that run next to the model.

Owns: when transfers are made, and what waits for them.  Does not know: which pages move, or why.
"""

import logging
from collections.abc import Sequence

from engine.execution.captured_steps import CapturedDecodes
from engine.execution.device import fair_share, host_place
from engine.execution.features import RankContext, RankFeature
from engine.execution.needs import Needs
from engine.features.host_tier.copy_stream import copies_on
from engine.features.host_tier.landings import LandedAttention, LandedDecodes, Landings
from engine.features.host_tier.messages import NAME, transfers_of
from engine.features.host_tier.pool import HostPool
from engine.features.host_tier.settings import HostTierSettings
from engine.host.memory import available_bytes
from engine.layers.attention import AttentionBackend
from engine.layers.kv_pool import KVPool
from engine.messages import Step
from engine.startup.memory import MAX_HOST_SHARE, require_room
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)


class HostTierRank(RankFeature):
    """The host pools of one rank: one for its KV pool, and one for every pool that a feature has."""

    order = 0

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._landings = Landings(copies_on(context.device))
        self._others: list[HostPool] = []
        self.pool: HostPool

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """Return attention that waits for the pages of its layer, if copies run next to the model."""
        return LandedAttention(backend, self._landings) if self._landings.copies.overlaps else backend

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Return decode steps that wait for all pages: a step that runs whole waits for no single layer."""
        return LandedDecodes(whole, self._landings) if self._landings.copies.overlaps else whole

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Allocate host memory.  Raises ConfigError if there is none."""
        num_pages, comm = HostTierSettings.of(self._context.config).num_host_pages, self._context.comm
        page_bytes = sum(one.data.nbytes // (one.num_pages + 1) for one in (pool, *pools))  # each has a dump page
        on_cpu = pool.data.device.type == "cpu"
        # A pool on CPU takes its memory only as pages are written, so its memory still counts as available.
        available = fair_share(available_bytes(), host_place(), comm, pool.data.device)
        available = max(0, available - (pool.data.nbytes if on_cpu else 0))
        asked = f"kv.num_host_pages={num_pages}: {num_pages * page_bytes / 1e9:.1f} GB of host memory"
        require_room(asked, num_pages, page_bytes, available, MAX_HOST_SHARE, needs if on_cpu else Needs())
        try:
            self.pool = HostPool(num_pages, pool, self._landings)
            # Features read these pages before any layer of the model, so no copy of them may be under way in a step.
            self._others = [HostPool(num_pages, one, Landings(copies_on(self._context.device))) for one in pools]
        except MemoryError as error:
            raise ConfigError(f"{asked} cannot be allocated ({error}); lower it") from None
        size, locked = num_pages * page_bytes / 1e6, "" if on_cpu else ", page-locked"
        log.info("rank %d host_pool=%.1f MB (%d pages)%s", comm.rank, size, num_pages, locked)

    def begin(self, step: Step) -> None:
        """Wait for copies that the step before has not waited for."""
        self._landings.settle()

    def apply(self, step: Step) -> Step:
        """Make the transfers of the step."""
        if NAME in step.parts:
            transfers = transfers_of(step)
            self.pool.apply(transfers)
            for other in self._others:
                other.apply(transfers)
                other.settle()
        return step


def rank_feature(context: RankContext) -> HostTierRank | None:
    """Return the host tier, or None if the configuration has none."""
    return HostTierRank(context) if HostTierSettings.of(context.config).num_host_pages else None
