"""Page-locked buffers under overlap: none is written before its copy ran, and in a steady run nobody waits for one."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.plugins.attention.flashinfer.backend import BUFFERS, STEPS_IN_FLIGHT, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import Setup
from engine.plugins.attention.flashinfer.lists import ALIGNMENT, HostLists, gather_pages
from engine.plugins.attention.flashinfer.staging import StagingRing
from tests.attention.fake_device import FakeEvent, FakeStream
from tests.attention.fake_flashinfer import fake_flashinfer
from tests.attention.test_flashinfer import part_of
from tests.attention.test_torch_backend import Paged, paged, spec_of

CPU = torch.device("cpu")


class CarelessEvent(FakeEvent):
    """What the code would be without events."""

    def synchronize(self) -> None: ...


def overlapped(
    case: Paged,
    steps: list[tuple[int, int]],
    lag: int,
    num_plans: int = BUFFERS * 2 * 2,
    num_lists: int = BUFFERS * 2,
    event: type[FakeEvent] = FakeEvent,
) -> tuple[FakeStream, list[tuple[Paged, list[Tensor]]]]:
    """Run steps on a device that is ``lag`` steps behind the host; results by step and layer.

    num_plans, num_lists: buffers for each."""
    stream = FakeStream()
    setup = Setup(
        library=fake_flashinfer(stream),
        spec=case.spec,
        pool=case.pool,
        workspace=torch.zeros(64, dtype=torch.uint8),
        plans=StagingRing(num_plans, CPU, lambda: event(stream)),
        tensor_cores=True,
        num_sms=8,
    )
    lists = StagingRing(num_lists, CPU, lambda: event(stream))
    backend = FlashInferAttention(setup, lists, "auto", ("prefill", "decode"))
    marks, results = [], []
    with torch.inference_mode():
        for number, (first, last) in enumerate(steps):
            if number >= lag:
                stream.run(marks[number - lag])
            part = part_of(case, case.batch, first, last)
            backend.plan_step(part.batch)
            layers = range(case.spec.num_layers)
            results.append((part, [backend.attend(layer, part.q_TNH) for layer in layers]))
            marks.append(stream.mark())
    return stream, results


def check(stream: FakeStream, results: list[tuple[Paged, list[Tensor]]]) -> None:
    stream.run()
    for part, outs in results:
        for layer, out_TNH in enumerate(outs):
            assert (out_TNH.double() - part.expected(layer)).abs().max() <= 2e-6


SEQUENCES = [(30, 1), (64, 1), (9, 1), (17, 1), (33, 7), (50, 2), (12, 12), (5, 3)]
STEPS = [(0, 8), (1, 6), (2, 7), (0, 3), (3, 8), (5, 8), (1, 5), (0, 8), (2, 4), (4, 5), (0, 6), (3, 7)]


@pytest.mark.parametrize("lag", [1, STEPS_IN_FLIGHT])
def test_with_as_many_steps_in_flight_as_the_engine_has_nobody_waits(lag: int):
    case = paged(spec_of(2, 1, 8, 7, 1), SEQUENCES, 4, seed=1)
    stream, results = overlapped(case, STEPS, lag)
    check(stream, results)
    assert stream.num_waits == 0


@pytest.mark.parametrize(("num_plans", "num_lists"), [(1, 100), (3, 100), (100, 1), (100, 3)])
def test_a_device_that_falls_further_behind_is_waited_for(num_plans: int, num_lists: int):
    case = paged(spec_of(2, 1, 8), SEQUENCES, 4, seed=2)
    stream, results = overlapped(case, STEPS, 100, num_plans, num_lists)
    check(stream, results)
    assert stream.num_waits > 0


@pytest.mark.parametrize(("num_plans", "num_lists"), [(3, 100), (100, 3)])
def test_without_waiting_a_step_would_run_with_another_ones_plan_or_lists(num_plans: int, num_lists: int):
    """The mutants that prove the test above."""
    case = paged(spec_of(2, 1, 8), SEQUENCES, 4, seed=2)
    stream, results = overlapped(case, STEPS, 100, num_plans, num_lists, CarelessEvent)
    with pytest.raises(AssertionError):
        check(stream, results)


def test_a_buffer_is_waited_for_once_and_only_if_something_was_sent_from_it():
    stream = FakeStream()
    ring = StagingRing(2, CPU, stream.event)
    first = ring.take(10)
    first.sent()
    second = ring.take(10)
    assert second is not first
    stream.queue(lambda: None)
    second.sent()
    assert ring.take(10) is first
    assert stream.num_waits == 0, "nothing was queued before the first was sent"
    assert ring.take(10) is second
    assert stream.num_waits == 1
    assert ring.take(10) is first
    assert ring.take(10) is second
    assert stream.num_waits == 1, "nobody has sent them again"


def test_a_buffer_grows_only_after_its_copies_ran():
    stream = FakeStream()
    ring = StagingRing(1, CPU, stream.event)
    staging = ring.take(100)
    small = staging.data
    assert len(small) == 128
    seen: list[int] = []
    small[0] = 7
    stream.queue(lambda: seen.append(int(small[0])))
    staging.sent()
    assert len(ring.take(129).data) == 256
    assert seen == [7]


def test_on_a_cpu_a_copy_has_run_when_it_returns():
    staging = StagingRing(1, CPU).take(4)
    staging.sent()
    staging.wait()
    assert not staging.data.is_pinned()


def test_lists_of_lengths_around_the_ends_of_pages():
    lengths = np.array([1, 3, 4, 5, 8, 0], dtype=np.int32)
    queries = np.array([1, 3, 1, 2, 8, 1], dtype=np.int32)
    host = HostLists(StagingRing(1, CPU), lengths, queries, page_size=4)
    assert host.starts_B1.tolist() == [0, 1, 2, 3, 5, 7, 8]
    assert host.last_B.tolist() == [1, 3, 4, 1, 4, 1]
    assert host.lengths_B.tolist() == [1, 3, 4, 5, 8, 1]
    assert host.query_starts_B1.tolist() == [0, 1, 4, 5, 7, 15, 16]
    assert host.num_pages == 8
    arrays = (host.starts_B1, host.last_B, host.lengths_B, host.query_starts_B1)
    assert {array.dtype for array in arrays} == {torch.int32}
    offsets = [array.storage_offset() for array in arrays]
    assert offsets == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
    assert torch.equal(host.starts_and_last[: len(lengths) + 1], host.starts_B1)


@pytest.mark.parametrize("num_rows", [63, 64, 200])
def test_lists_of_many_rows_do_not_overlap(num_rows: int):
    lengths = np.arange(1, num_rows + 1, dtype=np.int32)
    host = HostLists(StagingRing(1, CPU), lengths, np.ones(num_rows, dtype=np.int32), page_size=8)
    assert host.starts_B1[-1] == sum(-(-length // 8) for length in range(1, num_rows + 1))
    assert torch.equal((host.starts_B1.diff() - 1) * 8 + host.last_B, host.lengths_B)
    assert torch.equal(host.query_starts_B1, torch.arange(num_rows + 1, dtype=torch.int32))


def test_gathering_leaves_what_lies_beyond_the_lists_alone():
    table = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 4], [7, 0, 0, 0]], dtype=torch.int32)
    pages = torch.full((9,), -1, dtype=torch.int32)
    gather_pages(table, torch.tensor([0, 2, 6, 7], dtype=torch.int32), pages)
    assert pages[:-1].tolist() == [5, 6, 1, 2, 3, 4, 7, -1]
