"""Pages that move to host memory and back."""

from collections.abc import Iterator

import numpy as np
import torch

from engine.features.host_tier.copy_stream import copies_on
from engine.features.host_tier.landings import Landings
from engine.features.host_tier.messages import Transfers
from engine.features.host_tier.pool import HostPool
from engine.layers.kv_pool import KVPool
from engine.messages import Step
from gpu_sections.rows import Row, seconds_of


def host_pool(device: torch.device, num_layers: int = 28, num_bytes: int = 1 << 27) -> Iterator[Row]:
    """Pages to the host and back: equal afterwards, no wait on the way, and how fast beside one plain pinned copy.

    num_bytes: of a transfer; more than the pool's staging memory, so that it has several parts."""
    for page_size, layout in ((1, "layer_first"), (16, "layer_first"), (64, "layer_first"), (16, "page_first")):
        num_pages = num_bytes // KVPool.page_bytes(num_layers, page_size, 8, 128, torch.bfloat16)
        pool = KVPool(num_layers, 2 * num_pages, page_size, 8, 128, torch.bfloat16, device, layout)
        host = HostPool(2 * num_pages, pool, Landings(copies_on(device)))
        order = np.random.default_rng(page_size).permutation(2 * num_pages)
        yield from _host_pool_case(pool, host, f"{layout}, page {page_size}, a run", np.arange(num_pages))
        yield from _host_pool_case(pool, host, f"{layout}, page {page_size}, scattered", order[:num_pages])
        yield _overlap_case(pool, host, f"{layout}, page {page_size}", num_layers)
        del pool, host  # before the next size is allocated and page-locked


def _host_pool_case(pool: KVPool, host: HostPool, case: str, on_host: np.ndarray) -> Iterator[Row]:
    """Both directions, from half of the pool's pages to the other half, by way of ``on_host``."""
    device = pool.data.device
    sources, targets = np.random.default_rng(0).permutation(pool.num_pages).reshape(2, -1)
    there, back = _transfer(1, sources, on_host), _transfer(0, targets, on_host)
    for step in (there, back):
        host.apply(step)  # kernels are loaded now, which may wait
    pool.data.normal_(generator=torch.Generator(device).manual_seed(0))
    expected = pool.data[:, :, sources.tolist()]  # compared on the device, where that takes no time
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        host.apply(there)
        pool.data.zero_()  # at once: on the stream the copies must be ahead of it
        host.apply(back)
        host.settle()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    differing = int((pool.data[:, :, targets.tolist()] != expected).sum())
    differing += int((host.read(on_host.tolist()).to(device).movedim(0, 2) != expected).sum())
    num_bytes = expected.nbytes
    ours = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for way, step, target, source in (("to host", there, pinned, ours), ("back", back, ours, pinned)):
        plain = seconds_of(lambda target=target, source=source: target.copy_(source, non_blocking=True), device)
        seconds = seconds_of(lambda step=step: host.apply(step), device)
        row = {"case": f"{case}, {way}", "ok": differing == 0, "error": differing, "us": seconds * 1e6}
        yield {**row, "gb_per_s": num_bytes / seconds / 1e9, "of_plain": plain / seconds}


def _overlap_case(pool: KVPool, host: HostPool, case: str, num_layers: int) -> Row:
    """Pages come back beside a forward pass that takes about as long: how many times as fast as one after the other."""
    device = pool.data.device
    pages = np.arange(pool.num_pages // 2)
    back = _transfer(0, pages, pages)
    side = 2048 if device.type == "cuda" else 64  # a CPU without bfloat16 takes seconds for the large one
    square = torch.randn((side, side), device=device, dtype=torch.bfloat16)
    host.apply(back)
    copying = seconds_of(lambda: (host.apply(back), host.settle()), device)
    products = min(1000, max(1, round(copying / num_layers / seconds_of(lambda: square @ square, device))))

    def step(waits_by_layer: bool) -> None:
        host.apply(back)
        if not waits_by_layer:
            host.settle()
        for layer in range(num_layers):
            host.landings.wait_for(layer)
            for _ in range(products):
                square @ square

    seconds = {waits: seconds_of(lambda waits=waits: step(waits), device) for waits in (False, True)}
    row = {"case": f"{case}, back beside a forward pass", "ok": True, "us": seconds[True] * 1e6}
    return {**row, "of_plain": seconds[False] / seconds[True]}


def _transfer(to_host: int, device_pages: np.ndarray, host_pages: np.ndarray) -> Step:
    columns = (np.full(len(host_pages), to_host), device_pages, host_pages)
    direction, on_device, on_host = (column.astype(np.int32).tobytes() for column in columns)
    return Transfers(to_host=direction, device_pages=on_device, host_pages=on_host)
