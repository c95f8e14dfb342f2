"""A run broken into graphs and eager bodies does what the run itself does, whatever is broken at."""

import pytest
import torch
from torch import Tensor

from engine.graphs.breakable import SegmentRecorder
from tests.graphs.recording import RecordingDevice, RecordingError


@torch.library.custom_op("callboard_test::host_scale", mutates_args=())
def host_scale(x: Tensor) -> Tensor:
    """Reads a value on the host: no graph may contain it."""
    return x * float(x[0, 0])


@torch.library.custom_op("callboard_test::host_shift", mutates_args=("x",))
def host_shift(x: Tensor) -> None:
    """The same, in place."""
    x.add_(float(x[0, 0]))


@pytest.fixture
def device():
    with torch.inference_mode():
        yield RecordingDevice()


def breaker_on(device, *named):
    return SegmentRecorder(device, device.pool(), named)


def record(recorder, device, size, run):
    with device.stream():
        return recorder.record(size, run)


def test_graphs_and_bodies_alternate(device):
    recorder = breaker_on(device)
    given, between = device.buffer((2,), torch.float32), device.buffer((2,), torch.float32)
    calls = []

    def run():
        doubled = given * 2
        weak = recorder.weak(doubled)
        recorder.run("note", lambda: calls.append(weak.tolist()))
        recorder.run("copy", lambda: between.copy_(weak + 1))
        return between * 10 + doubled

    recording = record(recorder, device, 2, run)
    assert len(recording.parts) == 5
    assert recording.breaks == {"note": 1, "copy": 1}
    assert calls == [[0, 0]]
    assert recording.result.tolist() == [10, 10]  # every part has run already
    given.copy_(torch.tensor([1.0, 2.0]))
    assert recording.replay().tolist() == [32, 54]
    assert calls == [[0, 0], [2, 4]]
    assert not recorder.recording


def test_outside_a_recording_a_break_is_a_plain_call(device):
    recorder = breaker_on(device)
    called = []
    recorder.run("any", lambda: called.append(1))
    x = torch.ones(1)
    assert recorder.weak(x) is x
    assert recorder.call("any", torch.add, (x, 1), {}).item() == 2
    assert called == [1]
    assert device.graphs == []


def named_run(given):
    """An operation of each kind: one that makes its result, one that changes its argument."""

    def run():
        x = given + 1
        y = torch.ops.callboard_test.host_scale(x)
        torch.ops.callboard_test.host_shift(x)
        return torch.ops.callboard_test.host_scale(x + y) - y

    return run


def test_named_operations_run_eagerly_between_graphs(device):
    recorder = breaker_on(device, "callboard_test::host_scale", "callboard_test::host_shift")
    given = device.buffer((8, 2), torch.float32)
    recordings = {size: record(recorder, device, size, named_run(given[:size])) for size in (8, 4)}
    assert recordings[8].breaks == {"callboard_test::host_scale": 2, "callboard_test::host_shift": 1}
    for size in (8, 4, 8):
        given.normal_()
        expected = named_run(given[:size])()
        assert torch.equal(recordings[size].replay(), expected)


def test_results_of_eager_work_stay_where_they_are_for_all_sizes(device):
    """The largest size comes first and its buffers hold the others; each place of a run has its own."""
    recorder = breaker_on(device, "callboard_test::host_scale")
    given = device.buffer((8, 2), torch.float32)
    made = []

    def run(size):
        made.append([torch.ops.callboard_test.host_scale(given[:size] + place) for place in range(2)])
        return made[-1][0] + made[-1][1]

    for size in (8, 4):
        record(recorder, device, size, lambda size=size: run(size))
    large, small = made
    assert [one.data_ptr() for one in small] == [one.data_ptr() for one in large]
    assert large[0].data_ptr() != large[1].data_ptr()


def test_a_result_that_moves_is_noticed(device):
    """What ``call`` is for: without it the next graph would read the address of the first result for ever."""
    recorder = breaker_on(device)
    given = device.buffer((4,), torch.float32)

    def run():
        moving = []
        recorder.run("any", lambda: moving.append(given + 1))
        return moving[-1] * 2

    with pytest.raises(RecordingError, match="made outside the captures"):
        record(recorder, device, 4, run)


@pytest.mark.parametrize("where", ["captured", "body"])
def test_after_a_failure_the_next_recording_works(device, where):
    recorder = breaker_on(device)
    given = device.buffer((4,), torch.float32)

    def fail():
        raise RuntimeError("no more memory")

    def run(failing):
        x = given.add_(1)
        if failing and where == "captured":
            fail()
        recorder.run("any", fail if failing else lambda: None)
        return x * 2

    with pytest.raises(RuntimeError, match="no more memory"):
        record(recorder, device, 4, lambda: run(True))
    assert not recorder.recording
    assert not device.is_capturing()
    # What was captured before the body has run once, like everything in front of a break.
    assert given.tolist() == [0 if where == "captured" else 1] * 4
    given.zero_()
    recording = record(recorder, device, 4, lambda: run(False))
    assert recording.result.tolist() == [2] * 4
    assert recording.replay().tolist() == [4] * 4


def test_a_recording_inside_a_recording_is_a_bug(device):
    recorder = breaker_on(device)
    given = device.buffer((4,), torch.float32)
    with pytest.raises(AssertionError, match="being recorded"):
        record(recorder, device, 4, lambda: recorder.record(4, lambda: given + 1).result)
    assert not device.is_capturing()
