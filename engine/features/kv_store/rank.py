"""The KV store on a rank: pages that leave for it, pages that come from it.

Owns: when pages are copied, and the names of this rank's pages.  Does not know: how a store keeps them.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Final

from engine.actors.runner import Answer
from engine.execution.features import RankContext, RankFeature
from engine.execution.needs import Needs
from engine.execution.page_contents import page_namespace
from engine.features.kv_store.messages import NAME, FetchPages
from engine.features.kv_store.pages import StoredPages, StoredStates
from engine.features.kv_store.records import DIGEST_BYTES, PageRecords
from engine.layers.kv_pool import KVPool
from engine.messages import FeatureRequest, Step
from engine.plugins.hookspecs import KVStoreContext
from engine.plugins.kv_store.kind import KV_STORE
from engine.plugins.kv_store.store import KVStore

BUFFER_BYTES: Final = 256 << 20  # of host memory for pages in transfer from the store, and as many for those to it


class StoreRank(RankFeature):
    """The pages of one rank on their way to the store and back, once ``build`` has opened it."""

    order = 10  # a landing may go into a page that the same step moves to the host

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.pages: StoredPages

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Open the store.  Raises PluginError."""
        context, page = self._context, pool.by_page[0]
        namespace = page_namespace(context, pool)
        records, states = self._records(namespace, page.nbytes), None
        if context.states is not None:
            size = context.states.data[0].nbytes
            of_states = hashlib.sha256(repr((namespace, "states", size)).encode()).digest()
            states = StoredStates(self._records(of_states, size), context.states)
        self.pages = StoredPages(records, pool, context.comm.rank, BUFFER_BYTES, states)

    def _records(self, namespace: bytes, num_bytes: int) -> PageRecords:
        context = self._context
        store_context = KVStoreContext(
            record_bytes=DIGEST_BYTES + num_bytes,
            namespace=namespace.hex(),
            rank=context.comm.rank,
            size=context.comm.size,
        )
        store = context.plugins.build(context.plugins.names[KV_STORE], store_context, KVStore)
        return PageRecords(store, namespace, num_bytes)

    def begin(self, step: Step) -> None:
        """Copy the pages that the step saves out of the pool, before anything else of the step changes them."""
        self.pages.save(step)

    def apply(self, step: Step) -> Step:
        """Copy fetched pages into the pool."""
        self.pages.land(step)
        return step

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        """Begin to fetch pages, and give up when the message's time is over."""
        if message.feature != NAME:
            return False
        fetch = FetchPages.of(message)
        asyncio.get_running_loop().call_later(fetch.timeout_s, self.pages.give_up, fetch.fetch_id)
        self.pages.fetch(fetch, lambda fetched: answer(fetched.message()))
        return True

    def close(self) -> None:
        """Write the pages that wait to be written, within limits."""
        self.pages.close()

    def leave(self) -> None:
        """End the threads without a wait."""
        self.pages.close(timeout_s=0.0)


def rank_feature(context: RankContext) -> StoreRank | None:
    """Return the rank's side of the store, or None if the configuration names no store."""
    return StoreRank(context) if KV_STORE in context.plugins.names else None
