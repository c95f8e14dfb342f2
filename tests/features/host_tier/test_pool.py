"""The host pool against dictionaries: after any transfers, every page holds what copying one by one gives."""

import gc
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.features.host_tier import pool as host_pool
from engine.features.host_tier.copy_stream import CopyStream, copies_on
from engine.features.host_tier.landings import Landings
from engine.features.host_tier.messages import Transfers
from engine.features.host_tier.pool import HostPool
from engine.layers.kv_pool import KVPool, Layout
from engine.layers.mixed_pool import MixedPool
from engine.messages import Step
from tests.features.host_tier.late_copies import LateCopies

NUM_PAGES, NUM_HOST_PAGES = 7, 5  # few, so that targets repeat within most steps
LAYERS, KV_HEADS, HEAD_SIZE = 3, 2, 8
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=NEEDS_CUDA)]
Moves = list[tuple[int, int, int]]


def step_of(moves: Iterable[tuple[int, int, int]]) -> Step:
    """moves: (1 to the host or 0 back, device page, host page)."""
    columns = np.array(list(moves), dtype=np.int32).T
    to_host, device_pages, host_pages = (np.ascontiguousarray(column).tobytes() for column in columns)
    return Transfers(to_host=to_host, device_pages=device_pages, host_pages=host_pages)


class Pools:
    """Both pools, and the same as dictionaries: page -> its bytes."""

    def __init__(
        self,
        device: str,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        layout: Layout = "layer_first",
        copies: CopyStream | None = None,
    ) -> None:
        place = torch.device(device)
        self.pool = KVPool(LAYERS, NUM_PAGES, page_size, KV_HEADS, HEAD_SIZE, dtype, place, layout)
        self.copies = copies or copies_on(place)
        self.host = HostPool(NUM_HOST_PAGES, self.pool, Landings(self.copies))
        self.generator = torch.Generator().manual_seed(0)
        for page in range(NUM_PAGES):
            self.pool.data[:, :, page] = self.content()
        self.on_device = dict(enumerate(self.device_pages()))
        self.on_host = dict(enumerate(self.host_pages()))

    def content(self) -> Tensor:
        shape = self.pool.data[:, :, 0].shape
        return torch.randn(shape, generator=self.generator).to(self.pool.data.device, self.pool.data.dtype)

    def overwrite(self, page: int) -> None:
        """What the model does with a page."""
        self.pool.data[:, :, page] = self.content()
        self.on_device[page] = as_bytes(self.pool.data[:, :, page])

    def move(self, moves: Moves) -> None:
        self.host.apply(step_of(moves))
        for to_host, device_page, host_page in moves:
            if to_host:
                self.on_host[host_page] = self.on_device[device_page]
            else:
                self.on_device[device_page] = self.on_host[host_page]

    def device_pages(self) -> list[bytes]:
        """As a step reads them: layer by layer, each when it has waited for its own."""
        layers = []
        for layer in range(LAYERS):
            self.host.landings.wait_for(layer)
            layers.append(self.pool.data[layer].clone())
        data = torch.stack(layers)
        return [as_bytes(data[:, :, page]) for page in range(NUM_PAGES)]

    def host_pages(self) -> list[bytes]:
        if isinstance(self.copies, LateCopies):
            self.copies.finish()
        if self.pool.data.is_cuda:
            torch.cuda.synchronize()
        return [as_bytes(self.host.read([page])[0]) for page in range(NUM_HOST_PAGES)]

    def check(self) -> None:
        wrong = [page for page, content in enumerate(self.device_pages()) if content != self.on_device[page]]
        wrong_on_host = [page for page, content in enumerate(self.host_pages()) if content != self.on_host[page]]
        assert (wrong, wrong_on_host) == ([], []), "pages on the device and on the host with other content than copied"


def as_bytes(page: Tensor) -> bytes:
    return page.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("layout", "staged_pages"), [("layer_first", 1), ("layer_first", 3), ("layer_first", 1000), ("page_first", 1000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_random_transfers_do_what_copying_page_by_page_does(
    device: str,
    page_size: int,
    dtype: torch.dtype,
    layout: Layout,
    staged_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_bytes = KVPool.page_bytes(LAYERS, page_size, KV_HEADS, HEAD_SIZE, dtype)
    monkeypatch.setattr(host_pool, "STAGING_BYTES", staged_pages * page_bytes)
    pools = Pools(device, page_size, dtype, layout)
    rng = np.random.default_rng(page_size)
    seen: Counter[str] = Counter()
    walk(pools, rng, seen)
    assert min(seen["same target again"], seen["source was target"], seen["target was source"]) > 20, seen


def walk(pools: Pools, rng: np.random.Generator, seen: Counter[str]) -> None:
    """Steps of random transfers; some read all pages, layer by layer, and few look at the host."""
    for _ in range(60):
        # Long runs and short ones: a direction is kept with probability 0.8 or is thrown anew for each page.
        keep, direction, moves = rng.choice([0.0, 0.8]), 1, []
        for _ in range(rng.integers(1, 20)):
            direction = direction if rng.random() < keep else int(rng.integers(2))
            moves.append((direction, int(rng.integers(NUM_PAGES)), int(rng.integers(NUM_HOST_PAGES))))
        seen += what_happens(moves)
        pools.move(moves)
        if rng.random() < 0.3:
            pools.check()
        else:
            assert pools.device_pages() == list(pools.on_device.values())
        for page in rng.permutation(NUM_PAGES)[: rng.integers(NUM_PAGES)].tolist():
            pools.overwrite(page)
    pools.check()


def late_walk(page_size: int, layout: Layout) -> LateCopies:
    copies = LateCopies()
    walk(Pools("cpu", page_size, layout=layout, copies=copies), np.random.default_rng(page_size), Counter())
    return copies


@pytest.mark.parametrize(("page_size", "layout"), [(1, "layer_first"), (16, "layer_first"), (16, "page_first")])
@pytest.mark.parametrize("staged_pages", [1, 3])
def test_copies_that_come_as_late_as_they_may_change_nothing(
    page_size: int, layout: Layout, staged_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = KVPool.page_bytes(LAYERS, page_size, KV_HEADS, HEAD_SIZE, torch.float32)
    monkeypatch.setattr(host_pool, "STAGING_BYTES", staged_pages * page_bytes)
    assert late_walk(page_size, layout).num_waits > 60


def never(*_: object) -> None:
    """What a mutant does instead."""


def gathered_without_waiting(self: HostPool, device_pages: np.ndarray, host_pages: np.ndarray) -> None:
    """Pages are gathered over those that are still on their way out."""
    self.landings.settle()
    for page, host_page in zip(device_pages, host_pages, strict=True):
        for group in self._groups:
            group.leaving[0] = group.on_device[page]
        self.copies.queue(partial(self._send, np.array([host_page])))


def sent_from_the_pool(self: HostPool, device_pages: np.ndarray, host_pages: np.ndarray) -> None:
    """Pages are given away before they are out."""
    self.landings.settle()
    index_n = self._index(device_pages)

    def send() -> None:
        for group in self._groups:
            group.on_host[host_pages.tolist()] = group.on_device[index_n]

    self.copies.queue(send)


MUTANTS = {
    "a layer does not wait": (Landings, "wait_for", never),
    "a page that has just come back leaves without waiting": (Landings, "settle", never),
    "the last group alone is waited for": (Landings, "expect", lambda self, layer, mark: self._marks.update({2: mark})),
    "pages on their way out are overwritten": (HostPool, "_write_back", gathered_without_waiting),
    "pages are given away before they are out": (HostPool, "_write_back", sent_from_the_pool),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_does_not_wait_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        late_walk(16, "layer_first")


def what_happens(moves: Moves) -> Counter[str]:
    """How often one step does what makes the order matter."""
    seen: Counter[str] = Counter()
    sources: set[tuple[str, int]] = set()
    targets: set[tuple[str, int]] = set()
    for to_host, device_page, host_page in moves:
        source, target = ("device", device_page), ("host", host_page)
        if not to_host:
            source, target = target, source
        seen["same target again"] += target in targets
        seen["source was target"] += source in targets
        seen["target was source"] += target in sources
        sources.add(source)
        targets.add(target)
    return seen


@pytest.mark.parametrize("device", DEVICES)
def test_two_pages_trade_places_through_the_host_within_one_step(device: str) -> None:
    pools = Pools(device)
    first, second, *_ = pools.device_pages()
    pools.move([(1, 0, 4), (1, 1, 2), (0, 1, 4), (0, 0, 2)])
    assert pools.device_pages()[:2] == [second, first]
    pools.check()


@pytest.mark.parametrize("device", DEVICES)
def test_of_several_copies_to_one_page_the_last_one_counts(device: str) -> None:
    pools = Pools(device)
    pools.move([(1, 0, 3), (1, 1, 3), (1, 2, 1), (1, 5, 3)])
    assert pools.host_pages()[3] == pools.on_device[5]
    pools.move([(0, 6, 1), (0, 6, 3)])
    assert pools.device_pages()[6] == pools.on_device[5]
    pools.check()


@pytest.mark.parametrize("device", DEVICES)
def test_one_host_page_can_fill_several_device_pages(device: str) -> None:
    pools = Pools(device)
    pools.move([(1, 2, 3), (1, 1, 4), (0, 5, 3), (0, 0, 4), (0, 6, 3)])
    assert pools.device_pages()[5] == pools.device_pages()[6] == pools.device_pages()[2]
    pools.check()


@pytest.mark.parametrize("num_layers", [1, 3, 4, 7, 28])
def test_groups_have_every_layer_once_and_few_pages_on_the_way(num_layers: int) -> None:
    pool = KVPool(num_layers, NUM_PAGES, 4, KV_HEADS, HEAD_SIZE, torch.float32, torch.device("cpu"))
    host = HostPool(NUM_HOST_PAGES, pool, Landings(LateCopies()))
    sizes = [group.on_host.shape[1] for group in host._groups]
    assert (sum(sizes), len(sizes)) == (num_layers, min(num_layers, host_pool.NUM_GROUPS))
    assert max(sizes) - min(sizes) <= 1
    assert host._coming.shape[1] == max(sizes)
    assert host.read([0]).shape == (1, *pool.by_page.shape[1:])
    assert host.num_bytes == NUM_HOST_PAGES * pool.by_page[0].nbytes


def test_host_pages_that_were_never_written_take_no_memory_on_cpu() -> None:
    pool = KVPool(LAYERS, NUM_PAGES, 16, KV_HEADS, HEAD_SIZE, torch.float32, torch.device("cpu"))
    before = resident_bytes()
    host = HostPool(
        (1 << 30) // KVPool.page_bytes(LAYERS, 16, KV_HEADS, HEAD_SIZE, torch.float32),
        pool,
        Landings(copies_on(pool.data.device)),
    )
    assert host.num_bytes > 0.9 * (1 << 30)
    assert resident_bytes() - before < 0.1 * (1 << 30)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


class FakeCudart:
    """What is locked, by address; ``status`` is the answer to the next lock."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.status:
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


class Owner:
    """Whose memory it is."""


def test_memory_is_locked_as_long_as_its_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, memory, owner = FakeCudart(), torch.zeros(100, dtype=torch.uint8), Owner()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    host_pool._page_lock(memory, torch.device("cuda"), owner)
    address = memory.data_ptr()
    del memory
    gc.collect()
    assert cudart.locked == {address: 100}
    del owner
    gc.collect()
    assert cudart.locked == {}


def test_memory_that_cannot_be_locked_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(status=2))
    with pytest.raises(MemoryError, match="error 2"):
        host_pool._page_lock(torch.zeros(100, dtype=torch.uint8), torch.device("cuda"), Owner())


@NEEDS_CUDA
def test_memory_is_page_locked_and_transfers_do_not_wait_for_the_gpu() -> None:
    pools = Pools("cuda", page_size=16)
    assert all(group.on_host.is_pinned() for group in pools.host._groups)
    moves = [(1, page, (page + 1) % 5) for page in range(5)] + [(0, page, page % 5) for page in range(7)]
    pools.move(moves)  # kernels are loaded now, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        pools.move(moves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pools.check()


@NEEDS_CUDA
def test_the_memory_of_a_pool_that_is_gone_can_be_locked_again() -> None:
    for _ in range(3):
        pools = Pools("cuda")
        pools.move([(1, 0, 0)])
        del pools
        gc.collect()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_layers_with_other_heads_wait_for_their_own_pages(layout: Layout) -> None:
    # The widest layer comes third, and the last two read what layers before them store.
    heads, lenders = ((2, 4), (2, 4), (1, 16), (2, 4), (2, 4), (1, 16)), (0, 1, 2, 3, 1, 2)
    pool = MixedPool(heads, lenders, NUM_PAGES, 4, torch.float32, torch.device("cpu"), layout)
    host = HostPool(NUM_HOST_PAGES, pool, Landings(LateCopies()))
    pool.by_page.copy_(torch.randn(pool.by_page.shape))
    slots_S = 2 * pool.page_stride + torch.arange(4)

    def read(layer: int) -> Tensor:
        return torch.cat([one.flatten(1) for one in pool.read(layer, pool.own_slots(layer, slots_S))], 1)

    before = [read(layer) for layer in range(len(heads))]
    host.apply(step_of([(1, 2, 0)]))
    host.landings.settle()
    pool.by_page[2] = 0
    host.apply(step_of([(0, 2, 0)]))
    for layer, expected in enumerate(before):
        host.landings.wait_for(layer)
        assert torch.equal(read(layer), expected), f"layer {layer} reads a page that has not landed"
