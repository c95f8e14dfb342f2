"""Queues that serve a policy: order, leaving out of turn, coming back, ranks that change."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Admit
from engine.plugins.policy.fair import FairOptions, FairShare
from engine.plugins.policy.fcfs import FirstComeFirstServed
from engine.plugins.policy.lpm import LongestPrefixMatch
from engine.plugins.policy.priority import MostUrgentFirst
from engine.scheduling.policy import SchedulingPolicy, Waiting
from engine.scheduling.queue import WINDOW, waiting_queue
from engine.scheduling.rows import RowTable, Sequence
from engine.types.params import SamplingParams
from tests.scheduling.bench import Bench

ROWS = RowTable(2, 16, 4)
# With one tenant the last one is like the second.
POLICIES: list[SchedulingPolicy] = [
    FirstComeFirstServed(),
    MostUrgentFirst(),
    LongestPrefixMatch(64),
    FairShare(FairOptions()),
]


def sequence(arrival: int, priority: int = 0) -> Sequence:
    tokens = np.zeros(4, dtype=np.int32)
    return Sequence(arrival, arrival, priority, SamplingParams(), tokens, 4, 8, (), arrived_at=0.0)


@given(data=st.data())
def test_the_queue_gives_the_order_of_the_policy_whatever_comes_and_goes(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    cached = data.draw(st.lists(st.integers(0, 5), min_size=40, max_size=40))
    queue, naive = waiting_queue(policy, ROWS), list[Sequence]()
    arrivals, gone = iter(range(40)), list[Sequence]()
    for action in data.draw(st.lists(st.sampled_from(["push", "push", "pop", "look", "remove", "back"]), max_size=39)):
        if action == "push":
            new = sequence(next(arrivals), data.draw(st.integers(0, 2)))
            queue.push(new)
            naive.append(new)
        elif action == "remove" and naive:
            queue.remove(leaving := naive.pop(data.draw(st.integers(0, len(naive) - 1))))
            gone.append(leaving)
        elif action == "back" and gone:
            queue.push(back := gone.pop())
            naive.append(back)
        elif action in ("pop", "look"):
            queue.rerank(lambda one: cached[one.arrival])
            naive.sort(key=lambda one: (policy.rank(one), one.arrival))
            assert queue.first() is (naive[0] if naive else None)
            if naive and action == "pop":
                assert queue.pop(starts=False) is naive[0]
                gone.append(naive.pop(0))
        assert len(queue) == len(naive)


def test_only_the_oldest_are_ranked_anew_but_an_urgent_one_is_among_them() -> None:
    queue, asked = waiting_queue(LongestPrefixMatch(64), ROWS), list[int]()
    for arrival in range(WINDOW + 50):
        queue.push(sequence(arrival))
    queue.push(sequence(999, priority=-1))

    def num_cached(one: Sequence) -> int:
        asked.append(one.arrival)
        return one.arrival

    queue.rerank(num_cached)
    assert sorted(asked) == [*range(WINDOW - 1), 999]
    first = queue.first()
    assert first is not None
    assert first.arrival == 999


def test_a_policy_sees_how_long_an_output_may_get() -> None:
    class ShortestOutput:
        looks_at_cache = False

        def rank(self, waiting: Waiting) -> tuple[int, ...]:
            return (waiting.max_tokens,)

    planner = Bench(policy=ShortestOutput(), max_running=1).planner
    for request_id, params in enumerate(
        (SamplingParams(max_tokens=9), SamplingParams(max_tokens=None), SamplingParams(max_tokens=3))
    ):
        planner.admit(Admit(request_id=request_id, token_ids=bytes(4 * 5), params=params))
    seen = {one.request_id: one.max_tokens for one in planner.requests.open.values()}
    assert (seen[0], seen[2]) == (9, 3)
    assert seen[1] > 9, "what there is room for"


def test_who_is_overtaken_too_often_goes_first() -> None:
    queue = waiting_queue(LongestPrefixMatch(3), ROWS)
    queue.push(sequence(0))
    for arrival in range(1, 10):
        queue.push(sequence(arrival))
    order = []
    for _ in range(6):
        queue.rerank(lambda one: one.arrival)
        order.append(queue.pop(starts=True).arrival)
    assert order == [9, 8, 7, 0, 1, 2]


def test_who_is_only_put_off_overtakes_nobody() -> None:
    queue = waiting_queue(LongestPrefixMatch(1), ROWS)
    old, young = sequence(0), sequence(1)
    queue.push(old)
    queue.push(young)
    queue.rerank(lambda one: one.arrival)
    assert queue.pop(starts=False) is young
    assert old.num_overtaken == 0
