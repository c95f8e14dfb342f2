"""Tenants that share an engine: whose turn it is, what it costs, and that nobody saves up turns."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plugins.policy.fair import MOST_IDLE, FairOptions, FairShare
from engine.plugins.policy.priority import MostUrgentFirst
from engine.scheduling.queue import TenantQueue
from engine.scheduling.rows import RowTable, Sequence
from engine.types.params import SamplingParams
from engine.types.prompt import Origin
from tests.scheduling.bench import Bench, prompt_of


def share(**options: object) -> FairShare:
    return FairShare(FairOptions(**options))


def sequence(arrival: int, tenant: str, num_tokens: int = 4, priority: int = 0) -> Sequence:
    tokens = np.zeros(num_tokens, dtype=np.int32)
    origin = Origin(tenant=tenant)
    return Sequence(
        arrival, arrival, priority, SamplingParams(), tokens, num_tokens, 64, (), arrived_at=0.0, origin=origin
    )


class Rows:
    """A queue and the rows that it gives out, each request in one of its own."""

    def __init__(self, policy: FairShare) -> None:
        self.table = RowTable(64, 128, 4)
        self.queue = TenantQueue(policy, self.table)

    def start(self) -> Sequence:
        self.queue.rerank(lambda _: 0)
        first = self.queue.first()
        assert first is not None
        self.table.take(first, np.zeros(0, dtype=np.int32), 0)
        assert self.queue.pop(starts=True) is first
        return first

    def gain(self, one: Sequence, num_tokens: int) -> None:
        self.table.num_known[one.row] += num_tokens


def test_tenants_take_turns_by_what_they_were_served_whoever_came_first() -> None:
    rows = Rows(share())
    for arrival in range(6):
        rows.queue.push(sequence(arrival, "greedy"))
    rows.queue.push(sequence(6, "calm"))
    rows.queue.push(sequence(7, "calm", num_tokens=9))
    rows.queue.push(sequence(8, "calm"))
    # Among equals who has waited longest for a turn; the prompt of 9 is paid for by standing back once more.
    assert [rows.start().request_id for _ in range(9)] == [0, 6, 1, 7, 2, 3, 8, 4, 5]


def test_an_output_token_costs_more_than_one_of_a_prompt() -> None:
    rows = Rows(share(output_cost=3.0))
    for arrival, tenant in enumerate("aabb"):
        rows.queue.push(sequence(arrival, tenant))
    first, second = rows.start(), rows.start()
    assert [first.tenant, second.tenant] == ["a", "b"]
    rows.gain(first, 1)
    rows.gain(second, 2)
    assert rows.start().tenant == "a"
    assert [rows.queue._policy.turn(tenant) for tenant in "ab"] == [4 + 3 + 4, 4 + 6]


def test_who_weighs_twice_as_much_gets_twice_as_much() -> None:
    rows = Rows(share(weights={"gold": 2.0}))
    for arrival in range(60):
        rows.queue.push(sequence(arrival, ("gold", "iron")[arrival % 2]))
    assert Counter(rows.start().tenant for _ in range(30)) == {"gold": 20, "iron": 10}


def test_who_was_away_has_saved_nothing_up() -> None:
    rows = Rows(share())
    for arrival in range(30):
        rows.queue.push(sequence(arrival, "busy"))
    running = [rows.start() for _ in range(10)]
    rows.gain(running[-1], 50)  # which the tenant has got by the time the other one comes
    for arrival in range(30, 50):
        rows.queue.push(sequence(arrival, "new"))
    assert [rows.start().tenant for _ in range(8)] == ["busy", "new"] * 4


def test_an_urgent_request_goes_first_among_those_of_its_tenant_alone() -> None:
    rows = Rows(share())
    for arrival, (tenant, priority) in enumerate([("a", 0), ("b", 0), ("b", -100), ("a", 0)]):
        rows.queue.push(sequence(arrival, tenant, priority=priority))
    assert [rows.start().request_id for _ in range(4)] == [0, 2, 3, 1]


def test_what_the_engine_does_again_is_not_charged_again() -> None:
    rows = Rows(share())
    rows.queue.push(sequence(0, "a"))
    first = rows.start()
    rows.gain(first, 1)
    first.started_at, first.row = 0.0, -1
    rows.queue.push(first)
    rows.start()
    assert rows.queue._policy.turn("a") == 4 + 2


@given(data=st.data())
def test_the_lowest_turn_goes_first_whatever_comes_and_goes(data: st.DataObject) -> None:
    policy = share(weights={"t1": 3.0})
    rows, waiting, running = Rows(policy), list[Sequence](), list[Sequence]()
    for arrival in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["push", "push", "start", "gain", "remove"])):
            case "push":
                waiting.append(sequence(arrival, f"t{data.draw(st.integers(0, 3))}", data.draw(st.integers(1, 9))))
                rows.queue.push(waiting[-1])
            case "start" if waiting:
                rows.queue.rerank(lambda _: 0)
                turns = {one.tenant: policy.turn(one.tenant) for one in waiting}
                running.append(rows.start())
                assert turns[running[-1].tenant] == min(turns.values())
                assert running[-1] is next(one for one in waiting if one.tenant == running[-1].tenant)
                waiting.remove(running[-1])
            case "gain" if running:
                rows.gain(data.draw(st.sampled_from(running)), data.draw(st.integers(1, 3)))
            case "remove" if waiting:
                rows.queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        assert len(rows.queue) == len(waiting)
        assert len(rows.queue._heap) <= 2 * len(rows.queue._lanes) + 9


def test_tenants_that_came_once_are_forgotten() -> None:
    policy = share()
    for number in range(4 * MOST_IDLE):
        policy.returned(f"address {number}", number * 100.0)
        policy.served(f"address {number}", 10, 10)
    assert len(policy._counters) <= 2 * MOST_IDLE


@pytest.mark.parametrize("depth", [1, 2])
def test_through_the_planner_a_newcomer_gets_the_first_row_that_is_free(depth: int) -> None:
    bench = Bench(policy=share(), max_running=2, depth=depth)
    for request_id in range(12):
        bench.submit(request_id, prompt_of(5, request_id), max_tokens=8, ignore_eos=True, tenant="greedy")
    bench.step()
    bench.submit(12, prompt_of(5, 99), max_tokens=8, ignore_eos=True, tenant="calm")
    bench.finish()
    assert bench.started[:3] == [0, 1, 12]
    assert bench.streams == bench.expected
    # A prompt of 5 and 8 tokens for twice as much; what has come out by the time the last one started is counted.
    policy = bench.planner._prefills.queue._policy  # type: ignore[attr-defined]
    assert 5 + 2 * 7 <= policy.turn("calm") - 5 <= 5 + 3 * 16


def test_turns_that_rise_whenever_somebody_looks_keep_nobody_waiting() -> None:
    class Clock(FairShare):
        asked = 0

        def turn(self, tenant: str) -> float:
            self.asked += 1
            assert self.asked < 100, "the queue asks for ever"
            return float(self.asked)

    rows = Rows(Clock(FairOptions()))
    for arrival, tenant in enumerate("aabb"):
        rows.queue.push(sequence(arrival, tenant))
    assert sorted(rows.start().request_id for _ in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", [share(), MostUrgentFirst()])
def test_no_tenant_keeps_its_rows_by_naming_them_urgent(policy: FairShare | MostUrgentFirst) -> None:
    bench = Bench(policy=policy, depth=2, num_pages=12, page_size=4, max_len=48)
    bench.expect_short_outputs()
    for request_id, tenant in ((0, "calm"), (1, "pushing"), (2, "pushing")):
        priority = 0 if tenant == "calm" else -(1 << 31)
        prompt = prompt_of(6, seed=request_id)
        bench.submit(request_id, prompt, max_tokens=30, ignore_eos=True, tenant=tenant, priority=priority)
    bench.finish()
    assert bench.planner.meter.num_retractions > 0, "nothing scarce happened"
    assert (bench.started.count(0) == 1) == isinstance(policy, FairShare), "the oldest one keeps its row"
    assert bench.streams == bench.expected
