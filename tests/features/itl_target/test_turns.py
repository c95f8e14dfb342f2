"""Rows of a tenant with many sit steps out where all would take too long; each stream stays the undisturbed one."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from engine.features.itl_target.turns import TURN, divided
from engine.features.late_masks.planner import LateMasks
from engine.messages import Step
from tests.scheduling.bench import Bench, lose_the_device, prompt_of, segments

PER_ROW_S, BASE_S = 0.001, 0.001


def decoded(bench: Bench, step: Step) -> list[int]:
    """The requests that decode in a step."""
    rows = np.frombuffer(step.decode_rows, dtype=np.int32)
    return sorted(bench.planner.table.request_ids[rows].tolist())


def timed(bench: Bench) -> list[int]:
    """Plan a step, deliver its result after the time that it takes, and return the requests that decoded."""
    bench.plan()
    step = bench.steps[-1]
    rows = decoded(bench, step)
    bench.now += BASE_S + PER_ROW_S * len(rows) + 0.0001 * sum(segments(step).values())
    bench.deliver()
    return rows


def begin(tenants: dict[int, str], target_s: float = 0.001, depth: int = 1) -> Bench:
    """Requests by the tenant that each is of.  They come one after the other, so that what a row costs is learned."""
    bench = Bench(depth=depth, max_running=16, num_pages=800, max_len=512, itl_target_s=target_s)
    for number, tenant in tenants.items():
        bench.submit(number, prompt_of(6, seed=number), max_tokens=400, ignore_eos=True, tenant=tenant)
        for _ in range(3):
            timed(bench)
    return bench


MANY = {0: "few"} | dict.fromkeys(range(1, 10), "many")


def test_a_tenant_with_few_rows_waits_at_most_twice_as_long_as_alone() -> None:
    """A step with one row takes 2 ms here, and one of all ten rows 11."""
    bench = begin(MANY)
    for _ in range(20):
        timed(bench)
    steps = [timed(bench) for _ in range(9 * TURN)]
    assert all(rows[0] == 0 for rows in steps), "the row within its share is in each step"
    assert {len(rows) for rows in steps} <= {2, 3}, "1 ms and 3 times 1 ms are twice 2 ms"
    counts = [sum(number in rows for rows in steps) for number in range(1, 10)]
    assert max(counts) - min(counts) <= 2 * TURN, "the others take turns"


@pytest.mark.parametrize("tenants", [dict.fromkeys(range(10), "only"), {n: str(n) for n in range(10)}])
def test_tenants_without_more_than_their_share_have_all_rows_in_each_step(tenants: dict[int, str]) -> None:
    bench = begin(tenants)
    for _ in range(20):
        timed(bench)
    assert all(len(timed(bench)) == 10 for _ in range(3 * TURN))


def test_a_target_that_all_rows_meet_changes_nothing() -> None:
    bench = begin(MANY, target_s=0.012)
    for _ in range(20):
        timed(bench)
    assert all(len(timed(bench)) == 10 for _ in range(3 * TURN))


@pytest.mark.parametrize("depth", [1, 2])
def test_all_rows_return_when_the_other_tenant_ends_and_when_the_target_is_off(depth: int) -> None:
    bench = begin(MANY, depth=depth)
    for _ in range(30):
        timed(bench)
    assert len(timed(bench)) <= 3
    bench.planner.abort(0)
    for _ in range(4):
        timed(bench)
    assert len(timed(bench)) == 9
    bench.submit(10, prompt_of(6, seed=10), max_tokens=100, ignore_eos=True, tenant="few")
    for _ in range(12):
        timed(bench)
    assert len(timed(bench)) <= 3
    limits = bench.planner.requests.limits
    bench.planner.retune(replace(limits, itl_target_s=0.0), bench.planner._policy)
    timed(bench)
    assert len(timed(bench)) == 10
    bench.finish()
    del bench.streams[0]
    assert all(bench.streams[number] == bench.expected[number] for number in bench.streams)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_every_stream_is_the_undisturbed_one(seed: int) -> None:
    """Few pages, so that rows are retracted too; requests end, are aborted, and the device is lost."""
    dice = random.Random(seed)
    bench = Bench(depth=dice.choice((1, 2)), max_running=12, num_pages=60, max_len=256, itl_target_s=0.004)
    aborted = set()
    for number in range(40):
        tokens, tenant = dice.randint(1, 60), dice.choice(("few", "many", "many", "many", "many"))
        bench.submit(number, prompt_of(dice.randint(2, 20), seed=number), max_tokens=tokens, tenant=tenant)
        for _ in range(dice.randint(0, 6)):
            timed(bench)
        if dice.random() < 0.1 and not bench.ends[number]:
            bench.planner.abort(number)
            aborted.add(number)
        if dice.random() < 0.03:
            lose_the_device(bench)
    bench.finish()
    for number in set(range(40)) - aborted:
        assert bench.ends[number], f"request {number} has no end"
        assert bench.streams[number] == bench.expected[number]


def test_shares_are_equal_but_for_what_a_tenant_does_not_want() -> None:
    assert divided(9, {"a": 1, "b": 20, "c": 20}) == {"a": 1, "b": 4, "c": 4}
    assert divided(2, {"a": 1, "b": 20, "c": 20}) == {"a": 1, "b": 1, "c": 1}
    assert divided(100, {"a": 1, "b": 20, "c": 20}) == {"a": 1, "b": 20, "c": 20}


def late(bench: Bench, *requests: int) -> None:
    """Deliver a step's result, which says that the masks of these requests are late."""
    rows = [bench.planner.table.request_ids.tolist().index(request) for request in requests]
    parts = {LateMasks.part: msgspec.msgpack.encode(rows)}
    bench.device.done[0] = msgspec.structs.replace(bench.device.done[0], parts=parts)
    bench.now += BASE_S + PER_ROW_S
    bench.deliver()


def test_a_row_whose_mask_is_late_when_its_turn_comes_stays_out() -> None:
    bench = begin(MANY)
    for _ in range(20):
        timed(bench)
    bench.plan()
    waiting = sorted(set(range(1, 10)) - set(decoded(bench, bench.steps[-1])))
    for _ in range(10 * TURN):
        late(bench, *waiting[:3])
        bench.plan()
        assert not set(decoded(bench, bench.steps[-1])) & set(waiting[:3])
    bench.deliver()
    bench.finish()
    assert bench.streams == bench.expected


@pytest.mark.parametrize("num_steps", range(20, 20 + TURN))
def test_rows_return_when_the_masks_of_all_others_are_late(num_steps: int) -> None:
    bench = begin(MANY)
    for _ in range(num_steps):
        timed(bench)
    bench.plan()
    for _ in range(TURN):
        chosen = decoded(bench, bench.steps[-1])
        late(bench, *chosen)
        bench.plan()
        assert decoded(bench, bench.steps[-1])
        assert not set(decoded(bench, bench.steps[-1])) & set(chosen)
    bench.deliver()
    bench.finish()
    assert bench.streams == bench.expected
