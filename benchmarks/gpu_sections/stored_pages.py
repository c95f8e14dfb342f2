"""Pages that go to a store and come back from it."""

import threading

import numpy as np
import torch

from engine.features.kv_store.messages import FetchPages, Landing, PagesFetched, StoreMoves
from engine.features.kv_store.pages import StoredPages
from engine.features.kv_store.records import PageRecords
from engine.kv.node import chained
from engine.layers.kv_pool import KVPool
from engine.messages import Step
from gpu_sections.rows import Row

PAGE_SIZE = 16
TIMEOUT_S = 60.0


class Memory:
    """See ``KVStore``."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.closed = threading.Event()

    def get(self, name: bytes, record: memoryview) -> bool:
        record[:] = self.kept.get(name, bytes(len(record)))
        return name in self.kept

    def put(self, name: bytes, record: memoryview) -> None:
        self.kept[name] = bytes(record)

    def discard(self, name: bytes) -> None:
        self.kept.pop(name, None)

    def close(self) -> None:
        self.closed.set()


def stored_pages(device: torch.device, num_layers: int = 28, num_pages: int = 100) -> list[Row]:
    """From half of the pool's pages to the other half, by way of a store: equal, and no wait on the device thread."""
    rows = []
    for layout in ("layer_first", "page_first"):
        pool = KVPool(num_layers, 2 * num_pages, PAGE_SIZE, 8, 128, torch.bfloat16, device, layout)
        pool.data.normal_(generator=torch.Generator(device).manual_seed(0))
        sources, targets = np.random.default_rng(0).permutation(2 * num_pages).astype(np.int32).reshape(2, -1)
        expected = pool.data[:, :, sources.tolist()].cpu()
        tokens = np.arange(num_pages * PAGE_SIZE, dtype=np.int32).tobytes()
        hashes = b"".join(chained(b"", tokens, 4 * PAGE_SIZE))
        page_bytes = pool.by_page[0].nbytes
        store, answered = Memory(), threading.Event()
        stored = StoredPages(PageRecords(store, b"check", page_bytes), pool, 0, 2 * num_pages * page_bytes)
        found: list[int] = []

        def answer(fetched: PagesFetched, found: list[int] = found, came: threading.Event = answered) -> None:
            found.append(fetched.num_pages)
            came.set()

        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            stored.save(Step(step_id=0, parts=StoreMoves(save_pages=sources.tobytes(), save_hashes=hashes).part()))
            pool.data.zero_()  # at once: on the stream the copies must be ahead of it
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        stored._to_write.put(None)
        store.closed.wait(TIMEOUT_S)
        stored.fetch(FetchPages(fetch_id=0, parent=b"", tokens=tokens, timeout_s=TIMEOUT_S), answer)
        answered.wait(TIMEOUT_S)
        landed = StoreMoves(landings=(Landing(fetch_id=0, first=0, pages=targets[: sum(found)].tobytes()),))
        stored.land(Step(step_id=1, parts=landed.part()))
        differing = int((pool.data[:, :, targets.tolist()].cpu() != expected).sum())
        stored.close()
        rows.append({"case": f"{layout}, {sum(found)} of {num_pages} pages", "ok": not differing, "error": differing})
    return rows
