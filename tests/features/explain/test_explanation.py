"""Where a request's time went: parts that add up, and who else had a share in them."""

import random

import msgspec
import numpy as np
import pytest

from engine.features.explain import timelines
from engine.features.explain.explanation import Explained, TimeShare, explain
from engine.features.explain.timelines import STEP, Ring, StepLog
from engine.messages import Finish
from tests.scheduling.bench import Bench, lose_the_device, prompt_of

STEP_S = 0.25


def run(bench: Bench, *, prefill_s: float = 0.0, most: int = 10_000) -> None:
    """Steps of a quarter of a second, longer by ``prefill_s`` for each prompt token in them."""
    for _ in range(most):
        if not bench.plan():
            return
        bench.now += STEP_S + prefill_s * float(np.frombuffer(bench.steps[-1].prefill_lengths, dtype=np.int32).sum())
        bench.deliver()


def told(bench: Bench, request_id: int) -> tuple[Explained, dict[str, TimeShare]]:
    explained = explain(bench.planner.requests, bench.timelines, request_id, bench.now)
    assert explained is not None
    assert sum(part.seconds for part in explained.parts) == pytest.approx(explained.until - explained.arrived_at)
    assert all(part.seconds > 0 for part in explained.parts)
    return explained, {part.name: part for part in explained.parts}


def test_a_request_alone_is_prefilled_and_decodes() -> None:
    bench = Bench(depth=1, prefill_chunk=8, max_step_tokens=8)
    bench.submit(1, prompt_of(16), max_tokens=5, ignore_eos=True)
    run(bench)
    explained, parts = told(bench, 1)
    assert {name: part.seconds for name, part in parts.items()} == {"prefill": 2 * STEP_S, "decode": 4 * STEP_S}
    assert parts["prefill"].reasons == {"computing": 2 * STEP_S, "steps": 2, "tokens": 16}
    assert (explained.finish, explained.num_output_tokens, explained.missed) == (Finish.LENGTH, 5, {})
    assert explain(bench.planner.requests, bench.timelines, 7, bench.now) is None


def test_who_waits_for_a_row_is_told_who_had_it() -> None:
    bench = Bench(depth=1, max_running=1)
    bench.submit(1, prompt_of(8), max_tokens=5, ignore_eos=True)
    bench.submit(2, prompt_of(8, seed=2), max_tokens=1, ignore_eos=True)
    run(bench, most=2)
    explained, parts = told(bench, 2)
    assert (explained.finish, explained.num_output_tokens) == (Finish.RUNNING, None)
    assert parts["queue"].seconds == 2 * STEP_S
    run(bench)
    _, parts = told(bench, 2)
    assert parts["queue"].seconds == 5 * STEP_S
    assert parts["queue"].others == ((1, 5 * STEP_S),)
    assert parts["queue"].reasons["rows"] == 5 * STEP_S
    assert "pages" not in parts["queue"].reasons


def test_who_waits_for_pages_is_told_so_and_so_are_those_behind() -> None:
    bench = Bench(depth=1, num_pages=8, max_len=32)
    bench.submit(1, prompt_of(20), max_tokens=8, ignore_eos=True)
    bench.submit(2, prompt_of(20, seed=2), max_tokens=1, ignore_eos=True)
    bench.submit(3, prompt_of(4, seed=3), max_tokens=1, ignore_eos=True)
    run(bench)
    for waiting in (2, 3):
        _, parts = told(bench, waiting)
        assert parts["queue"].reasons["pages"] == pytest.approx(8 * STEP_S)
        assert "rows" not in parts["queue"].reasons


def test_who_is_overtaken_is_told_by_how_many() -> None:
    bench = Bench(depth=1, max_running=1)
    bench.submit(1, prompt_of(8), max_tokens=3, ignore_eos=True)
    run(bench, most=1)
    bench.submit(2, prompt_of(8, seed=2), max_tokens=1, ignore_eos=True, priority=5)
    bench.now += 0.1
    bench.submit(3, prompt_of(8, seed=3), max_tokens=2, ignore_eos=True)
    run(bench)
    _, parts = told(bench, 2)
    assert parts["queue"].reasons["overtaken_by"] == 1
    assert parts["queue"].others == ((1, pytest.approx(0.1 + 2 * STEP_S)), (3, pytest.approx(2 * STEP_S)))


def test_steps_that_others_prompts_make_longer_name_them() -> None:
    bench = Bench(depth=1, max_len=256, num_pages=128)
    bench.submit(1, prompt_of(4), max_tokens=60, ignore_eos=True)
    run(bench, most=20)
    bench.submit(2, prompt_of(32, seed=2), max_tokens=1, ignore_eos=True)
    run(bench, prefill_s=0.1)
    _, parts = told(bench, 1)
    assert parts["prefills"].seconds == pytest.approx(3.2)
    assert parts["prefills"].others == ((2, 32),)
    assert parts["prefills"].reasons["steps"] == 2, "chunks of 16"
    assert parts["decode"].seconds == pytest.approx(59 * STEP_S)
    assert "slow_steps" not in parts


@pytest.mark.parametrize("note", ["", "it was cut into parts"])
def test_a_slow_step_is_told_with_what_its_executor_says(note: str) -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(4), max_tokens=40, ignore_eos=True)
    run(bench, most=20)
    bench.plan()
    bench.now += 9 * STEP_S
    bench.device.done[0] = msgspec.structs.replace(bench.device.done[0], note=note)
    bench.deliver()
    run(bench)
    _, parts = told(bench, 1)
    assert parts["slow_steps"].reasons == {note or "device": pytest.approx(8 * STEP_S)}
    assert parts["decode"].seconds == pytest.approx(39 * STEP_S)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_pages_that_another_request_had_evicted_are_told_with_its_name(lookahead: int) -> None:
    bench = Bench(depth=1, num_pages=16, max_len=60, lookahead=lookahead)
    prompt = prompt_of(33)
    bench.submit(1, prompt, max_tokens=1, ignore_eos=True)
    run(bench)
    bench.submit(2, prompt_of(50, seed=2), max_tokens=1, ignore_eos=True)
    run(bench)
    bench.submit(3, prompt, max_tokens=1, ignore_eos=True)
    run(bench)
    explained, _ = told(bench, 3)
    num_missed = (32 - explained.num_cached_tokens) // 4
    assert 0 < num_missed <= 8
    assert explained.missed == {2: num_missed}
    assert told(bench, 2)[0].missed == {}


def test_a_lost_row_and_its_return_are_a_part() -> None:
    bench = Bench(depth=1, num_pages=12, max_len=48)
    bench.expect_short_outputs()
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(6, seed=request_id), max_tokens=30, ignore_eos=True)
    run(bench)
    explained, parts = told(bench, 2)
    assert explained.num_retractions > 0
    assert parts["retraction"].reasons["waiting"] > 0
    assert parts["retraction"].reasons["again"] >= STEP_S * explained.num_retractions
    assert "retraction" not in told(bench, 1)[1]


def test_lost_executors_are_a_part_of_those_that_ran_and_of_those_that_waited() -> None:
    bench = Bench(depth=1, max_running=1)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=5, ignore_eos=True)
    run(bench, most=3)
    bench.plan()
    bench.now += 3.0  # until somebody notices
    lose_the_device(bench)
    bench.now += 7.0  # until there are others
    run(bench)
    _, parts = told(bench, 1)
    assert parts["recovery"].reasons == {"unnoticed": 3.0, "waiting": 7.0, "again": STEP_S}
    assert parts["decode"].seconds == pytest.approx(3 * STEP_S)
    _, parts = told(bench, 2)
    assert parts["recovery"].seconds == 7.0
    assert parts["queue"].seconds == pytest.approx(3.0 + 5 * STEP_S)


@pytest.mark.parametrize("seed", range(8))
def test_parts_add_up_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    host_pages = rng.choice((0, 8))
    bench = Bench(max_running=3, num_pages=16, max_len=48, max_step_tokens=24, num_host_pages=host_pages)
    alive, submitted = [], 0
    for _ in range(400):
        bench.now += rng.expovariate(20.0)
        match rng.randrange(12):
            case 0 | 1 if submitted < 60:
                submitted += 1
                prompt = prompt_of(rng.randint(1, 30), seed=rng.randrange(4))
                bench.submit(submitted, prompt, max_tokens=rng.randint(1, 16), priority=rng.randrange(2))
                alive.append(submitted)
            case 2 if alive:
                bench.planner.abort(rng.choice(alive))
                bench.read()
            case 3 if rng.random() < 0.1:
                lose_the_device(bench)
            case 4 | 5 | 6 | 7:
                bench.plan()
            case _:
                bench.deliver()
        if alive:
            told(bench, rng.choice(alive))
    bench.finish()
    for request_id in alive:
        explained, _ = told(bench, request_id)
        assert explained.until - explained.arrived_at == pytest.approx(bench.metrics[request_id].e2e_s)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_KEPT", 3)
    bench = Bench(depth=1)
    for request_id in range(1, 6):
        bench.submit(request_id, prompt_of(4, seed=request_id), max_tokens=2, ignore_eos=True)
        run(bench)
    known = [explain(bench.planner.requests, bench.timelines, number, bench.now) for number in range(1, 6)]
    assert [one is not None for one in known] == [False, False, True, True, True]


def test_a_ring_keeps_the_last_records_in_their_order() -> None:
    ring = Ring(STEP, 4)
    for number in range(3):
        ring.note(number, 0.5, 1.5, 1, 2, 3, 0)
    assert ring.records()["step_id"].tolist() == [0, 1, 2]
    for number in range(3, 10):
        ring.note(number, 0.5, number * 1.5, 1, 2, 3, 0)
    assert ring.records()["step_id"].tolist() == [6, 7, 8, 9]
    assert ring.records()["completed_at"].tolist() == [9.0, 10.5, 12.0, 13.5]


def test_a_request_whose_steps_are_forgotten_still_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(depth=1, max_len=128)
    log: StepLog = bench.timelines.steps
    log.steps = Ring(STEP, 16)
    bench.submit(1, prompt_of(4), max_tokens=60, ignore_eos=True)
    run(bench)
    _, parts = told(bench, 1)
    assert parts["decode"].seconds == pytest.approx(59 * STEP_S)
    assert "slow_steps" not in parts
