"""Rows whose masks are late sit steps out: the others go on, and every stream stays the undisturbed one."""

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.features.late_masks.planner import LateMasks
from engine.messages import Step
from tests.scheduling.bench import Bench, lose_the_device, prompt_of


def deliver(bench: Bench, *late: int) -> bool:
    """Deliver the oldest result, which says that the masks of these requests are late."""
    if not bench.device.done:
        return False
    requests = bench.planner.table.request_ids.tolist()
    rows = tuple(requests.index(request) for request in late if request in requests)
    parts = {LateMasks.part: msgspec.msgpack.encode(rows)}
    bench.device.done[0] = msgspec.structs.replace(bench.device.done[0], parts=parts)
    return bench.deliver()


def decoded(bench: Bench, step: Step) -> list[int]:
    """The requests that decode in a step."""
    rows = np.frombuffer(step.decode_rows, dtype=np.int32)
    return sorted(bench.planner.table.request_ids[rows].tolist())


@pytest.fixture(params=[1, 2])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Three requests that all decode, the first one with a grammar; nothing is in flight."""
    bench = Bench(depth=request.param)
    for number in (1, 2, 3):
        bench.submit(number, prompt_of(6, seed=number), max_tokens=30, ignore_eos=True)
    bench.step()
    bench.step()
    assert decoded(bench, bench.steps[-1]) == [1, 2, 3]
    return bench


def test_a_row_sits_out_until_its_mask_is_ready(bench: Bench) -> None:
    bench.plan()
    deliver(bench, 1)
    for _ in range(4):
        bench.plan()
        assert decoded(bench, bench.steps[-1]) == [2, 3]
        deliver(bench, 1)
    bench.plan()
    deliver(bench)
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [1, 2, 3]
    bench.finish()
    assert bench.streams == bench.expected


def test_a_slow_row_is_in_one_step_at_a_time() -> None:
    """A second step in flight would wait for the mask that follows the token of the first."""
    bench = Bench(depth=2)
    for number in (1, 2):
        bench.submit(number, prompt_of(6, seed=number), max_tokens=30, ignore_eos=True)
    bench.step()
    bench.plan(), bench.plan()
    deliver(bench, 1)
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [2], "it is late"
    deliver(bench, 1), deliver(bench)
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [1, 2], "its mask is ready"
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [2], "it was slow, and its token is not known yet"
    deliver(bench)
    bench.plan(), bench.plan()
    assert decoded(bench, bench.steps[-1]) == [1, 2], "it is slow no more"
    deliver(bench)
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [1, 2]
    bench.finish()
    assert bench.streams == bench.expected


def test_a_slow_row_that_another_feature_returns_waits_for_its_step() -> None:
    bench = Bench(depth=2)
    for number in (1, 2, 3):
        bench.submit(number, prompt_of(6, seed=number), max_tokens=30, ignore_eos=True)
    bench.step()
    bench.plan(), bench.plan()
    deliver(bench, 1)
    bench.plan()
    deliver(bench, 1), deliver(bench)
    decodes, row = bench.planner._decodes, bench.planner.table.request_ids.tolist().index(1)
    begin = bench.planner.features.attach[0]
    bench.planner.features.attach = (lambda step: decodes.leave(row), *bench.planner.features.attach)
    bench.plan()
    bench.planner.features.attach = (begin, *bench.planner.features.attach[2:])
    assert decoded(bench, bench.steps[-1]) == [1, 2, 3]
    decodes.join(row)
    bench.planner.abort(3)
    bench.plan()
    assert decoded(bench, bench.steps[-1]) == [2], "its token is not known yet"
    bench.finish()
    for number in (1, 2):
        assert bench.streams[number] == bench.expected[number]


def test_a_row_that_is_alone_does_not_sit_out(bench: Bench) -> None:
    """A step that waits for its mask is better than none."""
    bench.planner.abort(2), bench.planner.abort(3)
    bench.read()
    bench.plan()
    while deliver(bench, 1):
        assert bench.plan() or bench.device.done or bench.ends[1]
    assert bench.streams[1] == bench.expected[1]


@pytest.mark.parametrize("end", [lambda bench: bench.planner.abort(1), lose_the_device], ids=["abort", "loss"])
def test_a_row_may_end_or_be_lost_while_it_sits_out(bench: Bench, end: Callable[[Bench], object]) -> None:
    bench.plan()
    deliver(bench, 1)
    end(bench)
    bench.read()
    bench.submit(4, prompt_of(6, seed=4), max_tokens=5, ignore_eos=True)
    bench.finish()
    for number in (2, 3, 4):
        assert bench.streams[number] == bench.expected[number]


@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([12, 64]))
@example(18, 1, 12)  # the row that decodes is retracted while the only other one sits out
@example(34, 2, 12)
def test_no_stream_changes_whichever_masks_are_late(seed: int, depth: int, num_pages: int) -> None:
    """Rows that sit out are also retracted, where there are few pages."""
    dice = random.Random(seed)
    bench = Bench(depth=depth, num_pages=num_pages)
    for number in range(5):
        bench.submit(number, prompt_of(dice.randint(1, 20), seed=number), max_tokens=dice.randint(1, 20))
    late: tuple[int, ...] = ()
    for _ in range(2000):
        if bench.plan() and dice.random() < 0.5:
            continue
        if dice.random() < 0.5:
            late = tuple(number for number in range(5) if dice.random() < 0.4)
        if not deliver(bench, *late) and not bench.device.done and not bench.plan():
            break
    assert bench.streams == bench.expected
    bench.finish()
