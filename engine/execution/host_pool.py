"""The host pool: host memory for pages that left the KV pool and may come back.

Legend: C host pages · P device pages · L layers · S page size · G KV heads (of this rank) · H head size · n pages moved
Owns: the memory, page-locked where the device is a GPU, and the copies between it and one KV pool.
Does not know: which page belongs to whom, or why one moves (``engine/kv/host_tier.py`` does).
"""

import contextlib
import math
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kv.pages import Pages
from engine.layers.kv_pool import KVPool
from engine.messages import Step

STAGING_BYTES = 64 << 20  # of device memory; enough for the bus to be busy, little beside a KV pool


class HostPool:
    """Page-first, [C, L, 2, S, G, H]: a page is one piece of memory and crosses the bus as one copy.

    Raises MemoryError if there is not so much memory, or if it cannot be page-locked.
    """

    def __init__(self, num_pages: int, pool: KVPool) -> None:
        self.num_pages = num_pages
        self._device_pages = pool.by_page
        shape, dtype, device = self._device_pages.shape[1:], self._device_pages.dtype, pool.data.device
        page_bytes = math.prod(shape) * dtype.itemsize
        # calloc: on CPU, pages that were never written take no memory.
        memory = torch.from_numpy(np.zeros(num_pages * page_bytes, dtype=np.uint8))
        self.data = memory.view(dtype).view(num_pages, *shape)
        # A page that is one block on the device too needs no gathering.
        num_staged = 0 if pool.by_page.is_contiguous() else min(num_pages, max(1, STAGING_BYTES // page_bytes))
        self._staging = torch.empty((num_staged, *shape), dtype=dtype, device=device)
        if device.type == "cuda":
            _page_lock(memory, device, owner=self)

    def apply(self, step: Step) -> None:
        """Make the transfers of a step that has some, in their order.

        On a GPU they are only queued, on the current stream: behind the steps that wrote the pages, before those that
        read them.  The host never touches this memory itself, so nothing else has to wait for them."""
        to_host = np.frombuffer(step.transfer_to_host, dtype=np.int32)
        device_pages = np.frombuffer(step.transfer_device_pages, dtype=np.int32)
        host_pages = np.frombuffer(step.transfer_host_pages, dtype=np.int32)
        turns = np.flatnonzero(np.diff(to_host)) + 1
        for start, end in pairwise((0, *turns.tolist(), len(to_host))):
            self._copy(bool(to_host[start]), device_pages[start:end], host_pages[start:end])

    def _copy(self, to_host: bool, device_pages: Pages, host_pages: Pages) -> None:
        """A run of one direction.  No copy in it reads what another one writes; only targets may repeat."""
        targets = host_pages if to_host else device_pages
        # Of equal targets the last one counts; np.unique names the first, so it gets them in reverse.
        _, from_end = np.unique(targets[::-1], return_index=True)
        kept = len(targets) - 1 - from_end
        # In the host's order, so that neighbours cross the bus as one copy.
        kept = kept[np.argsort(host_pages[kept], kind="stable")]
        device_pages, host_pages = device_pages[kept], host_pages[kept]
        if not len(self._staging):
            self._copy_blocks(to_host, device_pages, host_pages)
            return
        index = torch.from_numpy(device_pages.astype(np.int64))
        if self._staging.is_cuda:
            index = index.pin_memory().to(self._staging.device, non_blocking=True)
        for start in range(0, len(kept), len(self._staging)):
            part = slice(start, start + len(self._staging))
            self._copy_staged(to_host, index[part], host_pages[part])

    def _copy_blocks(self, to_host: bool, device_pages: Pages, host_pages: Pages) -> None:
        """Page by page, or as many at once as are neighbours on both sides."""
        gaps = np.flatnonzero((np.diff(host_pages) != 1) | (np.diff(device_pages) != 1)) + 1
        for start, end in pairwise((0, *gaps.tolist(), len(host_pages))):
            first, device_first = int(host_pages[start]), int(device_pages[start])
            on_host = self.data[first : first + end - start]
            on_device = self._device_pages[device_first : device_first + end - start]
            if to_host:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)

    def _copy_staged(self, to_host: bool, index_n: Tensor, host_pages: Pages) -> None:
        """As many pages as the staging buffer holds; the stream keeps the next ones from overtaking these."""
        staged = self._staging[: len(host_pages)]
        if to_host:
            torch.index_select(self._device_pages, 0, index_n, out=staged)
        gaps = np.flatnonzero(np.diff(host_pages) != 1) + 1
        for start, end in pairwise((0, *gaps.tolist(), len(host_pages))):
            first = int(host_pages[start])
            on_host, on_device = self.data[first : first + end - start], staged[start:end]
            if to_host:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)
        if not to_host:
            self._device_pages.index_copy_(0, index_n, staged)


def _page_lock(memory: Tensor, device: torch.device, owner: object) -> None:
    """Until ``owner`` is gone.  In place: torch's own pinned allocations are rounded up to a power of two."""
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise MemoryError(f"it cannot be page-locked: {cudart.cudaGetErrorString(status)}")
    weakref.finalize(owner, _unlock, cudart, memory, device).atexit = False


def _unlock(cudart: Any, memory: Tensor, device: torch.device) -> None:
    """Before the memory goes: what is allocated at its address later could not be locked otherwise."""
    with contextlib.suppress(RuntimeError):  # a device that has failed has nothing under way
        torch.cuda.synchronize(device)
    cudart.cudaHostUnregister(memory.data_ptr())
