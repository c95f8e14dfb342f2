"""The recording double forbids what real graphs forbid, and what they would do wrong without a word."""

import gc

import pytest
import torch

from engine.graphs.device import weak_reference
from tests.graphs.recording import RecordingDevice, RecordingError


@pytest.fixture
def device():
    with torch.inference_mode():
        yield RecordingDevice()


def capture(device, run, size=4, pool="pool"):
    with device.stream():
        device.begin_capture(pool, size)
        try:
            result = run()
        except BaseException:
            device.abandon()
            raise
        return device.end(), result


def test_captured_work_is_done_at_replay_with_the_values_of_then(device):
    given = device.buffer((3,), torch.float32)
    total = device.buffer((3,), torch.float32)
    factor = 2.0
    graph, doubled = capture(device, lambda: total.add_(given * factor))
    factor = 5.0  # baked in: the graph goes on with 2
    assert total.tolist() == [0, 0, 0]
    given.copy_(torch.tensor([1.0, 2, 3]))
    graph.replay()
    graph.replay()
    assert total.tolist() == [4, 8, 12]
    assert doubled is total


def test_what_a_capture_makes_is_uninitialised_until_replay(device):
    given = device.buffer((2,), torch.float32)
    graph, made = capture(device, lambda: given + 1)
    assert made.isnan().all()
    graph.replay()
    assert made.tolist() == [1, 1]


def test_a_tensor_from_outside_is_stale(device):
    moving = torch.ones(3)
    with pytest.raises(RecordingError, match="made outside the captures"):
        capture(device, lambda: moving + 1)
    assert not device.is_capturing()


def test_a_tensor_of_another_run_is_stale(device):
    static = device.buffer((3,), torch.float32)
    _, made = capture(device, lambda: static + 1, size=8)
    with pytest.raises(RecordingError, match="made by the run of 8"):
        capture(device, lambda: made + 1, size=4)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.index_put_((x > 0,), x[0]),
    ],
)
def test_reading_values_on_the_host_is_refused(device, read):
    static = device.buffer((3,), torch.float32)
    with pytest.raises(RecordingError, match="host"):
        capture(device, lambda: read(static))


def test_indexing_with_numbers_is_no_host_read(device):
    static, places = device.buffer((3,), torch.float32), device.buffer((2,), torch.int64)
    capture(device, lambda: static[places])


def test_begin_and_end_come_in_turns_on_a_stream_of_their_own(device):
    static = device.buffer((3,), torch.float32)
    with pytest.raises(RecordingError, match="stream"):
        device.begin_capture("pool", 4)
    with pytest.raises(RecordingError, match="no capture to end"):
        device.end()
    graph, _ = capture(device, lambda: static + 1)
    with device.stream():
        device.begin_capture("pool", 4)
        with pytest.raises(RecordingError, match="inside another"):
            device.begin_capture("pool", 4)
        with pytest.raises(RecordingError, match="inside a capture"):
            graph.replay()
        device.abandon()
        device.abandon()
    with pytest.raises(RecordingError, match="left inside"), device.stream():
        device.begin_capture("pool", 4)
    device.abandon()


def test_sizes_must_descend_or_at_least_begin_with_the_largest(device):
    static = device.buffer((3,), torch.float32)
    capture(device, lambda: static + 1, size=4)
    with pytest.raises(RecordingError, match="8 is captured after 4"):
        capture(device, lambda: static + 1, size=8)
    late = RecordingDevice(descending=False)
    static = late.buffer((3,), torch.float32)
    for size in (8, 2, 4):
        capture(late, lambda: static + 1, size=size)
    with pytest.raises(RecordingError, match="9 is captured after 4"):
        capture(late, lambda: static + 1, size=9)


def test_graphs_share_one_pool(device):
    static = device.buffer((3,), torch.float32)
    capture(device, lambda: static + 1)
    with pytest.raises(RecordingError, match="pool of its own"):
        capture(device, lambda: static + 1, pool="another")


def test_a_static_tensor_may_not_move(device):
    weight = torch.ones(3)
    device.register(weight)
    graph, _ = capture(device, lambda: weight + 1)
    graph.replay()
    weight.set_(torch.zeros(3))
    with pytest.raises(RecordingError, match="has moved"):
        graph.replay()
    held = [torch.ones(3)]
    device.register(*held)
    graph, _ = capture(device, lambda: held[0] + 1)
    held.clear()
    with pytest.raises(RecordingError, match="has moved"):
        graph.replay()


@pytest.mark.parametrize("held", [True, False])
def test_memory_that_nobody_holds_is_given_to_the_next_capture(device, held):
    static = device.buffer((3,), torch.float32)
    first, made = capture(device, lambda: static + 1)
    weak = device.weak(made)
    if not held:
        del made
    second, _ = capture(device, lambda: static * 2)
    first.replay()
    assert weak.tolist() == [1, 1, 1]
    second.replay()
    assert weak.isnan().all() != held


def test_a_weak_reference_shares_memory_and_does_not_keep_it():
    """The real one, which needs no GPU: only what it must not be used for does."""
    owner = torch.arange(12.0).view(3, 4)[:, 1:3]
    weak = weak_reference(owner)
    assert weak.data_ptr() == owner.data_ptr()
    assert weak.stride() == owner.stride()
    owner.add_(1)
    assert weak.tolist() == owner.tolist()
    storage = torch.multiprocessing.reductions.StorageWeakRef(owner.untyped_storage())
    del owner
    gc.collect()
    assert storage.expired()
