"""``CudaDevice`` against torch's captures, as torch 2.13 has them in CUDAGraph.cpp: what has begun when a call fails.

The double keeps torch's rules: an allocator records for a pool until it is told to end, and refuses to begin or to end
twice; a graph that was captured has a share in its pool until it is dropped.
"""

import gc
import weakref

import pytest
import torch

from engine.graphs.device import CudaDevice

POOL = (0, 7)


class Allocators:
    """recording: pools that the device's allocator takes memory from now; host: that of page-locked memory.
    shares: of graphs and captures in each pool.  fails: in which call CUDA fails.  graphs: that nobody has dropped."""

    def __init__(self):
        self.recording, self.host, self.shares = set(), set(), {POOL: 1}
        self.graphs = weakref.WeakSet()
        self.fails = ""

    def check(self, what):
        if self.fails == what:
            raise RuntimeError(f"CUDA error: {what}")

    def begin(self, pool):
        self.shares[pool] += 1
        assert pool not in self.recording, "already recording to mempool_id"
        self.recording.add(pool)

    def end(self, device, pool):
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device, pool):
        self.shares[pool] -= 1
        assert self.shares[pool] > 0


def graph_class(allocators):
    class FakeGraph:
        def __init__(self):
            allocators.graphs.add(self)
            self.pool, self.capturing, self.has_share = None, False, False
            self.resets = 0

        def capture_begin(self, pool, capture_error_mode):
            self.pool = pool
            allocators.begin(pool)
            allocators.host.add(pool)
            allocators.check("begin")
            self.capturing = True

        def capture_end(self):
            if not self.capturing:
                raise RuntimeError("CUDA error: operation not permitted")
            self.capturing = False
            allocators.check("end")
            allocators.end(0, self.pool)
            allocators.host.remove(self.pool)
            self.has_share = True
            allocators.check("instantiate")

        def reset(self):
            self.resets += 1
            if self.has_share:
                allocators.release(0, self.pool)
                self.has_share = False

        def __del__(self):
            self.reset()

    return FakeGraph


@pytest.fixture
def allocators(monkeypatch):
    made = Allocators()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_class(made))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return made


@pytest.fixture
def device(allocators):
    return CudaDevice(torch.device("cuda", 0))


def capture(device, body=lambda: None):
    """As ``SegmentRecorder.record`` does it."""
    try:
        device.begin_capture(POOL, 4)
        body()
        return device.end()
    except BaseException:
        device.abandon()
        raise


def fail_inside():
    raise ValueError("the model's own")


@pytest.mark.parametrize(
    ("fails", "body", "raised"),
    [
        ("begin", lambda: None, "CUDA error: begin"),
        ("end", lambda: None, "CUDA error: end"),
        ("end", fail_inside, "the model's own"),
        ("instantiate", lambda: None, "CUDA error: instantiate"),
        ("instantiate", fail_inside, "the model's own"),
        ("", fail_inside, "the model's own"),
    ],
)
def test_a_capture_that_fails_says_why_and_gives_back_what_it_took(allocators, device, fails, body, raised):
    allocators.fails = fails
    with pytest.raises((RuntimeError, ValueError), match=raised):
        capture(device, body)
    gc.collect()
    assert not allocators.recording
    assert allocators.shares[POOL] == 1
    kept = {graph.pool for graph in allocators.graphs}
    assert kept == allocators.host, "an allocator asks a graph that is gone"
    allocators.fails = ""
    if not kept:
        capture(device)  # nothing is left that would forbid the next one
        device.abandon()


def test_graphs_are_discarded_whoever_refers_to_them(allocators, device, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda which: entered.append(which) or torch.inference_mode())
    held, _ = capture(device), capture(device)
    gc.collect()
    device.discard()
    assert held.resets == 1
    assert entered == [torch.device("cuda", 0)]
    assert allocators.shares[POOL] == 1 + len([one for one in (held,) if one.has_share])
