"""Pages between a pool and a store: what is copied when, and that no store can keep anybody waiting."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.features.kv_store.messages import FetchPages, Landing, PagesFetched, StoreMoves
from engine.features.kv_store.pages import StoredPages
from engine.features.kv_store.records import DIGEST_BYTES, PageRecords
from engine.kv.node import chained
from engine.layers.kv_pool import KVPool
from engine.messages import Step
from tests.pace import far

PAGE_SIZE = 4
TOKENS = np.arange(5 * PAGE_SIZE, dtype=np.int32).tobytes()
PARENT = b"\0" * 32
HASHES = list(chained(PARENT, TOKENS, 4 * PAGE_SIZE))


class Memory:
    """A store that may be told to hang or to raise."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error: OSError | None = None
        self.num_gets = 0
        self.closed = threading.Event()

    def get(self, name: bytes, record: memoryview) -> bool:
        self.num_gets += 1
        assert self.goes_on.wait(far(20))
        if self.error is not None:
            raise self.error
        if name in self.kept:
            record[:] = self.kept[name]
        return name in self.kept

    def put(self, name: bytes, record: memoryview) -> None:
        assert self.goes_on.wait(far(20))
        if self.error is not None:
            raise self.error
        self.kept[name] = bytes(record)

    def discard(self, name: bytes) -> None:
        self.kept.pop(name, None)

    def close(self) -> None:
        self.closed.set()


class Bench:
    """A pool of random pages, a store, and the answers to fetches."""

    def __init__(self, most_pages: int = 100) -> None:
        self.pool = KVPool(3, 12, PAGE_SIZE, 2, 8, torch.float32, torch.device("cpu"))
        torch.nn.init.normal_(self.pool.data, generator=torch.Generator().manual_seed(0))
        self.before = self.pool.data.clone()
        page_bytes = KVPool.page_bytes(3, PAGE_SIZE, 2, 8, torch.float32)
        self.store = Memory()
        records = PageRecords(self.store, b"test", page_bytes)
        self.stored = StoredPages(records, self.pool, 0, most_pages * (DIGEST_BYTES + page_bytes))
        self.answers: dict[int, int] = {}
        self.answered = threading.Semaphore(0)

    def save(self, pages: list[int], hashes: list[bytes] = HASHES) -> None:
        packed = np.array(pages, dtype=np.int32).tobytes()
        self.stored.save(
            Step(step_id=0, parts=StoreMoves(save_pages=packed, save_hashes=b"".join(hashes[: len(pages)])).part())
        )

    def flush(self) -> None:
        """Wait until everything is written."""
        self.stored._to_write.put(None)
        assert self.store.closed.wait(far(20))

    def fetch(self, fetch_id: int) -> None:
        def answer(message: PagesFetched) -> None:
            assert message.fetch_id not in self.answers, "answered twice"
            self.answers[message.fetch_id] = message.num_pages
            self.answered.release()

        self.stored.fetch(FetchPages(fetch_id=fetch_id, parent=PARENT, tokens=TOKENS, timeout_s=1.0), answer)

    def wait(self) -> None:
        assert self.answered.acquire(timeout=far(20))

    def land(self, fetch_id: int, first: int, pages: list[int]) -> None:
        packed = np.array(pages, dtype=np.int32).tobytes()
        self.stored.land(
            Step(step_id=1, parts=StoreMoves(landings=(Landing(fetch_id=fetch_id, first=first, pages=packed),)).part())
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.goes_on.set()
    bench.stored.close()


def test_pages_come_back_where_they_are_wanted_and_nothing_else_changes(bench: Bench) -> None:
    bench.save([7, 2, 5, 0])
    bench.pool.data[:, :, [7, 2, 5, 0]] = torch.nan  # the copies were made before ``save`` returned
    bench.flush()
    bench.fetch(3)
    bench.wait()
    assert bench.answers == {3: 4}, "the fifth was never saved"
    bench.land(3, first=1, pages=[9, 7])
    expected = bench.before.clone()
    expected[:, :, [9, 7]] = bench.before[:, :, [2, 5]]
    expected[:, :, [2, 5, 0]] = torch.nan
    assert torch.equal(bench.pool.data.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert not bench.stored._fetches
    assert not bench.stored._num_read_bytes


def test_reading_stops_at_the_first_gap(bench: Bench) -> None:
    bench.save([1, 2, 3], [HASHES[0], HASHES[1], HASHES[3]])
    bench.flush()
    bench.fetch(0)
    bench.wait()
    assert bench.answers == {0: 2}


def test_a_store_that_hangs_is_waited_for_once(bench: Bench) -> None:
    bench.store.goes_on.clear()
    bench.fetch(0)
    while not bench.store.num_gets:
        threading.Event().wait(0.001)
    bench.stored.give_up(0)
    bench.fetch(1)  # at once: the reader is late
    assert bench.answers == {0: 0, 1: 0}
    bench.store.goes_on.set()
    while bench.stored._reading is not None:
        threading.Event().wait(0.001)
    bench.answered = threading.Semaphore(0)
    bench.fetch(2)
    bench.wait()
    bench.stored.give_up(2)
    assert bench.answers == {0: 0, 1: 0, 2: 0}
    assert bench.store.num_gets == 2
    for fetch_id in range(3):
        bench.land(fetch_id, 0, [])
    assert torch.equal(bench.pool.data, bench.before)


def test_a_store_that_raises_costs_nobody_anything(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.store.error = OSError(28, "no space left on device")
    for _ in range(3):
        bench.save([1])
    bench.fetch(0)
    bench.wait()
    bench.flush()
    assert bench.answers == {0: 0}
    assert not bench.stored._num_write_bytes
    said = [message for message in caplog.messages if "no space left" in message]
    assert len(said) == 3, "the first, second and fourth of four failures"


def test_what_waits_in_memory_is_bounded_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(most_pages=2)
    bench.store.goes_on.clear()
    bench.save([1, 2])
    bench.save([3], HASHES[2:])
    assert "1 pages were not saved so far" in caplog.text
    bench.store.goes_on.set()
    bench.flush()
    assert len(bench.store.kept) == 2
    other = Bench(most_pages=4)
    other.save([1, 2, 3, 4])
    other.flush()
    bench.store.kept |= other.store.kept
    bench.fetch(0)
    bench.wait()
    assert bench.answers == {0: 2}, "no more than fit at a time"
    bench.fetch(1)
    bench.wait()
    assert bench.answers[1] == 0, "the first two are not used yet"
    bench.land(0, 0, [])
    bench.fetch(2)
    bench.wait()
    assert bench.answers[2] == 2
    for one in (bench, other):
        one.stored.close()


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    bench = Bench()
    bench.save([1, 2, 3])
    bench.stored.close()
    assert len(bench.store.kept) == 3
    assert bench.store.closed.is_set()
