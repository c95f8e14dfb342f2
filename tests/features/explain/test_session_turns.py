"""The first token in which a prompt differs from a turn of its session."""

import tracemalloc

import numpy as np
import pytest

from engine.features.explain.explanation import explain
from engine.features.explain.session_turns import TURN_TOKENS, SessionTurn, SessionTurns, TurnDifference
from engine.messages import Admit
from engine.types.params import SamplingParams
from engine.types.prompt import Origin, RequestPart
from tests.scheduling.bench import Bench, prompt_of

SESSION = ("client", "s")


def turn(number: int, tokens: list[int], num_prompt: int = 4) -> SessionTurn:
    return SessionTurn(number, num_prompt, np.array(tokens, np.int32))


def different(turns: SessionTurns, prompt: list[int]) -> TurnDifference | None:
    return turns.difference(SESSION, np.array(prompt, np.int32))


@pytest.mark.parametrize(
    "prompt, position, in_answer",
    [([1, 2, 9, 4, 5, 6], 2, False), ([1, 2, 3, 4, 5, 7, 8], 5, True), ([8], 0, False)],
)
def test_the_first_token_that_differs_is_found(prompt: list[int], position: int, in_answer: bool) -> None:
    turns = SessionTurns()
    turns.keep(SESSION, turn(1, [1, 2, 3, 4, 5, 6]))
    found = different(turns, prompt)
    assert found is not None
    assert (found.position, found.num_left, found.in_answer) == (position, 6 - position, in_answer)
    assert np.frombuffer(found.shared, np.int32).tolist() == prompt[:position]
    assert np.frombuffer(found.was, np.int32).tolist() == [1, 2, 3, 4, 5, 6][position:]
    assert np.frombuffer(found.now, np.int32).tolist() == prompt[position:]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3]])
def test_a_prompt_that_continues_a_turn_or_is_its_beginning_does_not_differ(prompt: list[int]) -> None:
    turns = SessionTurns()
    turns.keep(SESSION, turn(1, [1, 2, 3, 4, 5, 6]))
    assert different(turns, prompt) is None
    assert turns.difference(("other", "s"), np.array([9], np.int32)) is None, "another client's session"


def test_a_prompt_is_compared_with_the_turn_that_it_shares_most_with() -> None:
    turns = SessionTurns()
    turns.keep(SESSION, turn(1, [1, 2, 3, 4]))
    turns.keep(SESSION, turn(2, [7, 8, 9]))
    turns.keep(SESSION, turn(3, [1, 2, 3, 4, 5, 6]))
    assert [one.request_id for one in turns._of_session[SESSION]] == [2, 3], "the third goes on with the first"
    found = different(turns, [7, 8, 1])
    assert found is not None
    assert (found.request_id, found.position) == (2, 2)


def test_turns_are_kept_within_a_bound() -> None:
    size = TURN_TOKENS + 4
    for turns in (SessionTurns(most_tokens=3 * size - 1), SessionTurns(most_sessions=2)):
        for name in ("a", "b", "a", "c"):
            turns.keep((name, ""), turn(1, [1, 2, 3, 4]))
        assert list(turns._of_session) == [("a", ""), ("c", "")]
        assert turns._num_tokens == 2 * size


def test_turns_of_a_token_take_as_much_as_they_count_for() -> None:
    turns, size = SessionTurns(most_tokens=100 * (TURN_TOKENS + 1)), 1000
    tracemalloc.start()
    try:
        for number in range(size):
            turns.keep(("client", f"{number:032x}"), turn(number, [1], num_prompt=1))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(turns._of_session) == 100
    assert taken < 4 * turns._num_tokens


def test_a_planner_compares_the_prompts_of_a_session_with_its_answers() -> None:
    bench = Bench(depth=1)
    first = prompt_of(10)

    def run(number: int, prompt: np.ndarray, session: str = "s") -> TurnDifference | None:
        parts = {"sessions": RequestPart(digest=session)}
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        bench.streams[number], bench.ends[number] = [], []
        ids = np.asarray(prompt, np.int32).tobytes()
        bench.planner.admit(
            Admit(request_id=number, token_ids=ids, params=params, origin=Origin(client="one"), parts=parts)
        )
        bench.finish()
        explained = explain(bench.planner.requests, bench.timelines, number, bench.now)
        assert explained is not None
        return explained.difference

    assert run(1, first) is None
    whole = [*first, *bench.streams[1]]
    assert run(2, np.array([*whole, 5])) is None
    changed = [*whole[:12], whole[12] + 1, 5]
    found = run(3, np.array(changed))
    assert found is not None
    assert (found.request_id, found.position, found.in_answer) == (2, 12, False), "the prompt of the second has it too"
    assert run(4, np.array([first[0] + 1]), session="other") is None
