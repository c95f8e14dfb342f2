"""The host pool: host memory for pages that left the KV pool and may come back.

Legend: C host pages · P device pages · L layers · S page size · G KV heads (of this rank) · R size of a record
        n pages moved
Owns: the memory, page-locked if the device is a GPU, and the copies between it and one KV pool.
Does not know: which sequence a page belongs to, or why one moves (``engine/features/host_tier/tier.py`` does).
"""

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.features.host_tier.copy_stream import Mark
from engine.features.host_tier.landings import Landings
from engine.features.host_tier.messages import Transfers
from engine.kv.pages import Pages
from engine.layers.kv_pool import KVPool

STAGING_BYTES = 64 << 20  # device memory; enough to keep the bus busy, little next to a KV pool
# Of pages that come back, the model waits for the first group only, if a layer takes longer to compute than to copy.
# More groups are more copies, each of which must be queued.
NUM_GROUPS = 4


@dataclass(frozen=True, slots=True)
class _Group:
    """Some neighbouring layers of every page, from ``first_layer`` on.

    on_host: [C, layers, 2, S, G, R], contiguous, so that neighbours cross the bus as one copy.
    on_device: [P + 1, layers, 2, S, G, R].
    leaving: [n, layers, 2, S, G, R], contiguous on the device: pages on their way out.
    """

    first_layer: int
    on_host: Tensor
    on_device: Tensor
    leaving: Tensor


class HostPool:
    """Pages in groups of layers: pages that come back land group by group, while the model already runs.

    Pages that leave are gathered on the model's own stream, so their places in the pool may be reused at once; the bus
    takes them from there while the step runs.  Raises MemoryError if there is not so much memory, or if it cannot be
    page-locked.
    """

    def __init__(self, num_pages: int, pool: KVPool, landings: Landings) -> None:
        self.num_pages = num_pages
        self.landings = landings
        self.copies = landings.copies
        self._left: Mark = None  # reached when the pages gathered last are on the host
        by_page, device = pool.by_page, pool.data.device
        num_layers, shape, dtype = by_page.shape[1], by_page.shape[2:], by_page.dtype
        self.page_bytes = by_page[0].nbytes
        layer_bytes = self.page_bytes // num_layers
        # calloc: on CPU, pages that were never written take no memory.
        memory = torch.from_numpy(np.zeros(num_pages * self.page_bytes, dtype=np.uint8))
        # A page that is one block on the device needs no gathering, unless the model overtakes the copy.
        is_staged = self.copies.overlaps or not by_page.is_contiguous()
        num_staged = min(num_pages, max(1, STAGING_BYTES // self.page_bytes)) if is_staged else 0
        num_groups = min(NUM_GROUPS, num_layers) if self.copies.overlaps else 1
        bounds = [num_layers * number // num_groups for number in range(num_groups + 1)]
        self._groups: list[_Group] = []
        for first, last in pairwise(bounds):
            part = memory[num_pages * first * layer_bytes : num_pages * last * layer_bytes]
            on_host = part.view(dtype).view(num_pages, last - first, *shape)
            leaving = torch.empty((num_staged, last - first, *shape), dtype=dtype, device=device)
            self._groups.append(_Group(first, on_host, by_page[:, first:last], leaving))
        # Without a stream for copies, copies of both directions are never under way at the same time.
        largest = max(self._groups, key=lambda group: group.leaving.shape[1]).leaving
        self._coming = torch.empty_like(largest) if self.copies.overlaps else largest
        if device.type == "cuda":
            _page_lock(memory, device, owner=self)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all pages."""
        return self.num_pages * self.page_bytes

    def read(self, host_pages: list[int]) -> Tensor:
        """Return [n, L, 2, S, G, R], a copy of the pages' content.  For checks: no copy may be under way."""
        return torch.cat([group.on_host[host_pages] for group in self._groups], 1)

    def settle(self) -> None:
        """Make the model's stream wait for every page that comes back."""
        self.landings.settle()

    def apply(self, transfers: Transfers) -> None:
        """Make transfers, in their order.

        On a GPU they are only queued, after the steps that wrote the pages or still read the content of their places.
        The steps that read them wait for them (``Landings``).  The host never touches this memory itself."""
        to_host = np.frombuffer(transfers.to_host, dtype=np.int32)
        device_pages = np.frombuffer(transfers.device_pages, dtype=np.int32)
        host_pages = np.frombuffer(transfers.host_pages, dtype=np.int32)
        turns = np.flatnonzero(np.diff(to_host)) + 1
        for start, end in pairwise((0, *turns.tolist(), len(to_host))):
            self._copy(bool(to_host[start]), device_pages[start:end], host_pages[start:end])

    def _copy(self, to_host: bool, device_pages: Pages, host_pages: Pages) -> None:
        """Copy a run of one direction.  No copy in it reads what another one writes; only targets may repeat."""
        targets = host_pages if to_host else device_pages
        # Of equal targets the last one counts; np.unique returns the first, so it gets them in reverse.
        _, from_end = np.unique(targets[::-1], return_index=True)
        kept = len(targets) - 1 - from_end
        # In the host's order, so that neighbours cross the bus as one copy.
        kept = kept[np.argsort(host_pages[kept], kind="stable")]
        device_pages, host_pages = device_pages[kept], host_pages[kept]
        if not len(self._coming):
            self._copy_blocks(to_host, device_pages, host_pages)
        elif to_host:
            self._write_back(device_pages, host_pages)
        else:
            for group in self._groups:
                mark = self.copies.queue(partial(self._bring_back, group, device_pages, host_pages))
                self.landings.expect(group.first_layer, mark)

    def _copy_blocks(self, to_host: bool, device_pages: Pages, host_pages: Pages) -> None:
        """Copy page by page, or several pages at once that are neighbours on both sides; only if nothing overlaps."""
        (group,) = self._groups
        gaps = np.flatnonzero((np.diff(host_pages) != 1) | (np.diff(device_pages) != 1)) + 1
        for start, end in pairwise((0, *gaps.tolist(), len(host_pages))):
            first, device_first = int(host_pages[start]), int(device_pages[start])
            on_host = group.on_host[first : first + end - start]
            on_device = group.on_device[device_first : device_first + end - start]
            if to_host:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)

    def _write_back(self, device_pages: Pages, host_pages: Pages) -> None:
        """Write pages back in parts of the staging memory's size; each part waits until the one before is out."""
        self.landings.settle()  # one of them may have come back just now
        for start in range(0, len(host_pages), len(self._coming)):
            part = slice(start, start + len(self._coming))
            self.copies.wait(self._left)
            index_n = self._index(device_pages[part])
            for group in self._groups:
                torch.index_select(group.on_device, 0, index_n, out=group.leaving[: len(index_n)])
            self._left = self.copies.queue(partial(self._send, host_pages[part]))

    def _send(self, host_pages: Pages) -> None:
        """Send the gathered pages to the host."""
        for group in self._groups:
            for at, on_host in _runs(group.on_host, host_pages):
                on_host.copy_(group.leaving[at : at + len(on_host)], non_blocking=True)

    def _bring_back(self, group: _Group, device_pages: Pages, host_pages: Pages) -> None:
        """Copy a group's layers to the device, in parts that fit ``_coming``, one after the other."""
        index_n = self._index(device_pages)
        for start in range(0, len(host_pages), len(self._coming)):
            part = host_pages[start : start + len(self._coming)]
            shape = (len(part), *group.on_host.shape[1:])
            coming = self._coming.flatten()[: math.prod(shape)].view(shape)
            for at, on_host in _runs(group.on_host, part):
                coming[at : at + len(on_host)].copy_(on_host, non_blocking=True)
            group.on_device.index_copy_(0, index_n[start : start + len(part)], coming)

    def _index(self, device_pages: Pages) -> Tensor:
        index_n = torch.from_numpy(device_pages.astype(np.int64))
        device = self._coming.device
        return index_n.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index_n


def _runs(on_host: Tensor, host_pages: Pages) -> Iterator[tuple[int, Tensor]]:
    """Yield runs of neighbouring pages: the index of the first in ``host_pages``, and the pages."""
    gaps = np.flatnonzero(np.diff(host_pages) != 1) + 1
    for start, end in pairwise((0, *gaps.tolist(), len(host_pages))):
        first = int(host_pages[start])
        yield start, on_host[first : first + end - start]


def _page_lock(memory: Tensor, device: torch.device, owner: object) -> None:
    """Lock memory until ``owner`` is gone.  In place: torch's own pinned allocations are rounded to a power of two."""
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise MemoryError(f"it cannot be page-locked: {cudart.cudaGetErrorString(status)}")
    weakref.finalize(owner, _unlock, cudart, memory, device).atexit = False


def _unlock(cudart: Any, memory: Tensor, device: torch.device) -> None:
    """Unlock memory before it is freed; otherwise memory allocated at its address later could not be locked."""
    with contextlib.suppress(RuntimeError):  # a device that has failed has nothing under way
        torch.cuda.synchronize(device)
    cudart.cudaHostUnregister(memory.data_ptr())
