"""The states that a planner copies, the copies that become snapshots, and the tokens that later requests save."""

from functools import partial

import numpy as np
import pytest

from engine.config import Config, build_config
from engine.features.explain.explanation import explain
from engine.features.speculation.messages import NAME as SPECULATION
from engine.features.speculation.payoff import Payoff
from engine.features.states.messages import copies_of
from engine.features.states.planner import MOST_AGAIN, StatesPlanner, planner_feature
from engine.features.states.slots import PAGES_PER_SLOT, SnapshotSlots
from engine.messages import Step
from engine.plugins.features import FeatureContext
from engine.plugins.manager import Plugins
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.plugins.snapshots.kind import SNAPSHOTS
from server.extensions.chaos.sim.liars import Everything, Liar
from tests.scheduling.bench import EOS, Bench, lose_the_device, prompt_of, segments
from tests.scheduling.fake_device import VOCAB, expected_output, next_token

PAGE = 4
NOTHING = EndsAndBranches(keeps_prompts=False, keeps_turns=False, keeps_branches=False)


class StateBench(Bench):
    """A bench whose model has states: pages of four tokens, chunks of sixteen."""

    def __init__(self, policy: EndsAndBranches = EndsAndBranches(), num_slots: int = 8, **sizes: object) -> None:  # noqa: B008
        feature = partial(StatesPlanner, policy=policy, num_slots=num_slots)
        super().__init__(features=[feature], **{"page_size": PAGE, **sizes})  # type: ignore[arg-type]
        (self.states,) = (one for one in self.planner.features.all if isinstance(one, StatesPlanner))

    def serve(self, request_id: int, prompt: np.ndarray, max_tokens: int = 1, **params: object) -> int:
        """Run a request alone; returns how many of its tokens were cached."""
        self.submit(request_id, prompt, max_tokens=max_tokens, **{"ignore_eos": True, **params})
        self.finish()
        self.states.check()
        assert self.streams[request_id] == self.expected[request_id]
        return self.cached[request_id]

    def conversation(self, request_id: int, prompt: np.ndarray, *more: int) -> np.ndarray:
        """The tokens of a request, and a user's next ones."""
        return np.concatenate((prompt, self.streams[request_id], np.array(more, dtype=np.int32))).astype(np.int32)


def copies(step: Step) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The copies before and after a step: (source, target)."""
    both = copies_of(step)
    return pairs(both.before), pairs(both.after)


def pairs(column: bytes) -> list[tuple[int, ...]]:
    return [tuple(one) for one in np.frombuffer(column, dtype=np.int32).reshape(2, -1).T.tolist()]


def test_a_chunk_ends_at_the_last_full_page_of_a_prompt_and_its_state_is_copied_after_it() -> None:
    bench = StateBench()
    bench.serve(1, prompt_of(30))
    assert [segments(step) for step in bench.steps] == [{0: 28}, {0: 2}]
    assert [copies(step) for step in bench.steps] == [([], [(0, 4)]), ([], [])]


def test_a_prompt_that_comes_again_starts_with_the_copied_state() -> None:
    bench = StateBench()
    bench.serve(1, prompt_of(30))
    assert bench.serve(2, prompt_of(30)) == 28
    assert [segments(step) for step in bench.steps[2:]] == [{0: 2}]
    assert copies(bench.steps[2])[0] == [(4, 0)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_the_next_turn_goes_on_at_the_last_full_page_of_the_one_before(num_tokens: int, depth: int) -> None:
    bench = StateBench(depth=depth)
    prompt = prompt_of(13)
    bench.serve(1, prompt, num_tokens)
    computed = 13 + num_tokens - 1
    assert bench.serve(2, bench.conversation(1, prompt, 7, 7, 7)) == computed // PAGE * PAGE


def test_a_turn_that_ends_by_a_token_is_found_unless_a_dropped_one_has_filled_a_page() -> None:
    found = []
    for length in range(9, 17):
        bench = StateBench(depth=2)
        prompt = prompt_of(length)
        stop = expected_output(prompt, 6)[5]
        bench.serve(1, prompt, 20, ignore_eos=True, stop_token_ids=(stop,))
        turn = bench.conversation(1, prompt, EOS, EOS)
        found.append((len(turn) - 3) // PAGE * PAGE - bench.serve(2, turn))
    assert set(found) <= {0, PAGE, 2 * PAGE}
    assert found.count(0) >= 6


def test_where_two_prompts_part_a_state_is_kept_for_the_third() -> None:
    bench = StateBench()
    stem = prompt_of(22)
    cached = [bench.serve(number, np.concatenate((stem, prompt_of(9, seed=number)))) for number in range(1, 5)]
    assert cached == [0, 0, 20, 20]


def test_cached_tokens_that_are_computed_again_are_counted_and_explained() -> None:
    bench = StateBench()
    stem = prompt_of(22)
    for number in (1, 2, 3):
        bench.serve(number, np.concatenate((stem, prompt_of(9, seed=number))))
    assert bench.states.gauges() == {"state_snapshots": 4, "tokens_without_state": 20}
    found = [explain(bench.planner.requests, bench.timelines, number, bench.now) for number in (1, 2, 3)]
    assert [one and one.num_recomputed for one in found] == [0, 20, 0]


def test_prompts_that_come_together_share_what_the_first_one_computes() -> None:
    bench = StateBench(prefill_chunk=8)
    stem = prompt_of(50)
    for number in (1, 2, 3):
        bench.submit(number, np.concatenate((stem, prompt_of(9, seed=number))), max_tokens=4, ignore_eos=True)
    bench.finish()
    assert [bench.cached[number] for number in (1, 2, 3)] == [0, 48, 48]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, everything proposed is verified."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)


def proposing(kind: str, num_slots: int = 8, **sizes: int) -> StateBench:
    liar = Liar(kind, lambda tokens: next_token(np.array(tokens)), VOCAB, 3)
    return StateBench(num_slots=num_slots, proposer=liar, **sizes)


@pytest.mark.usefixtures("always")
def test_behind_a_wrong_token_a_row_goes_back_to_the_state_before_its_step() -> None:
    bench = proposing("wrong")
    bench.serve(1, prompt_of(9), 8)
    assert [segments(step) for step in bench.steps[3:]] == [{0: 2}, {0: 2}, {}, {0: 3}, {0: 3}, {0: 3}]
    found = []
    for step in bench.steps[3:]:
        found.append(copies(step))
    # Steps with proposed tokens end where pages do, whose states are copied.
    assert found[:2] == [([(0, 5)], [(0, 6)]), ([(5, 0)], [(0, 5)])]
    # Of the next page's three tokens one is right in each step.
    assert found[3:] == [([(0, 6)], [(0, 7)]), ([(6, 0)], [(0, 7)]), ([(6, 0)], [(0, 6)])]
    assert bench.serve(2, bench.conversation(1, prompt_of(9))) == 16


@pytest.mark.usefixtures("always")
def test_no_token_is_computed_over_and_over_in_a_long_page() -> None:
    bench = proposing("half", page_size=32)
    bench.serve(1, prompt_of(3), 90)
    verifying = [step for step in bench.steps if SPECULATION in step.parts]
    columns = [np.frombuffer(one.prefill_lengths + one.prefill_samples, np.int32) for one in verifying]
    again = [int(lengths - samples) for lengths, samples in columns]
    assert len(again) > 20
    assert max(again) == MOST_AGAIN


@pytest.mark.usefixtures("always")
def test_rows_without_a_slot_for_their_state_are_decoded() -> None:
    bench = proposing("right", num_slots=2)
    for number in (1, 2, 3):
        bench.submit(number, prompt_of(9, seed=number), max_tokens=20 * number, ignore_eos=True)
    while bench.planner.num_open == 3 and bench.plan() | bench.deliver():
        assert SPECULATION not in bench.steps[-1].parts
    bench.finish()
    assert any(SPECULATION in step.parts for step in bench.steps), "a row has two slots alone"
    assert all(bench.streams[number] == bench.expected[number] for number in (1, 2, 3))


@pytest.mark.usefixtures("always")
def test_steps_that_verify_look_at_no_more_snapshots_if_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    is_on_host, looks = SnapshotSlots.is_on_host, []

    def counted(self: SnapshotSlots, slot: int) -> bool:
        looks.append(slot)
        return is_on_host(self, slot)

    monkeypatch.setattr(SnapshotSlots, "is_on_host", counted)
    bench, found = proposing("right", num_slots=80), []
    for number in range(12):
        looks.clear()
        bench.serve(number, prompt_of(9, seed=number), 8)
        found.append(len(looks))
    assert bench.states._tree.num_snapshots > 20
    assert len({*found}) == 1, found


@pytest.mark.parametrize(("proposer", "num_slots"), [("none", 4 + 1), ("ngram", 2 * 4 + 1)])
def test_states_that_are_set_aside_take_no_slot_from_snapshots(proposer: str, num_slots: int) -> None:
    config = build_config(Config(), {"scheduler": {"max_running": 4}, "plugins": {"proposer": proposer}})
    plugins = Plugins({SNAPSHOTS: "ends"})
    feature = planner_feature(FeatureContext(config, None, VOCAB, state_bytes=1, plugins=plugins))
    assert feature is not None
    bench = Bench(features=[feature], page_size=PAGE, num_pages=PAGES_PER_SLOT, max_running=4)
    (states,) = (one for one in bench.planner.features.all if isinstance(one, StatesPlanner))
    assert states._tree.num_to_take == num_slots


def test_a_prompt_waits_for_a_state_that_is_being_copied() -> None:
    bench = StateBench(depth=3)
    bench.submit(1, prompt_of(50), max_tokens=4, ignore_eos=True)
    assert bench.plan()
    bench.submit(2, prompt_of(50), max_tokens=4, ignore_eos=True)
    assert bench.plan()
    bench.finish()
    assert bench.cached == {1: 0, 2: 48}


def test_no_prompt_waits_for_tokens_that_it_cannot_use() -> None:
    bench = StateBench(EndsAndBranches(keeps_branches=False), prefill_chunk=8)
    for number in (1, 2):
        bench.submit(number, np.concatenate((prompt_of(50), prompt_of(9, seed=number))), max_tokens=1)
    assert bench.plan()
    assert bench.started == [1, 2]
    bench.finish()


def test_a_prompt_that_does_not_wait_cuts_no_other_one() -> None:
    bench = StateBench(max_step_tokens=8)
    bench.serve(0, prompt_of(34))
    num_before = len(bench.steps)
    bench.submit(1, prompt_of(90), max_tokens=1)
    assert bench.plan()
    bench.submit(2, np.concatenate((prompt_of(60), prompt_of(20, seed=2))), max_tokens=1)
    bench.finish()
    ends = 32 + np.cumsum([segments(step).get(0, 0) for step in bench.steps[num_before:]])
    assert bench.cached[1] == bench.cached[2] == 32
    assert 60 not in ends


def test_without_branches_only_whole_prompts_are_shared() -> None:
    bench = StateBench(EndsAndBranches(keeps_branches=False))
    stem = prompt_of(22)
    cached = [bench.serve(number, np.concatenate((stem, prompt_of(9, seed=number)))) for number in range(1, 5)]
    assert cached == [0, 0, 0, 0]


def test_a_long_prompt_has_a_state_a_little_before_its_end() -> None:
    bench = StateBench(max_len=512, num_pages=200)
    document = prompt_of(150)
    cached = [bench.serve(number, np.concatenate((document, prompt_of(30, seed=number)))) for number in (1, 2, 3)]
    assert cached == [0, 128, 148]


def test_every_second_page_has_a_state() -> None:
    bench = StateBench(EndsAndBranches(False, False, False, every=2))
    bench.serve(1, prompt_of(30))
    assert [segments(step) for step in bench.steps] == [{0: 8}, {0: 8}, {0: 8}, {0: 6}]
    other = prompt_of(30)
    other[19] += 1
    assert bench.serve(2, other) == 16


def test_without_any_snapshot_every_prompt_starts_at_its_beginning() -> None:
    bench = StateBench(NOTHING)
    assert [bench.serve(number, prompt_of(30), 9) for number in (1, 2)] == [0, 0]
    assert all(copies(step) == ([], []) for step in bench.steps)


def test_rows_that_start_together_each_get_a_copy() -> None:
    bench = StateBench()
    bench.serve(1, prompt_of(30))
    for number in (2, 3, 4):
        bench.submit(number, prompt_of(30), max_tokens=6, ignore_eos=True)
    bench.finish()
    assert [bench.cached[number] for number in (2, 3, 4)] == [28, 28, 28]
    assert sorted(copies(bench.steps[2])[0]) == [(4, 0), (4, 1), (4, 2)]


def test_a_state_is_of_no_use_before_its_step_has_completed() -> None:
    bench = StateBench(depth=3)
    bench.submit(1, prompt_of(30), max_tokens=1)
    assert bench.plan()
    assert bench.states._tree.num_snapshots == 0
    bench.deliver()
    assert bench.states._tree.num_snapshots == 1
    bench.finish()


def test_a_row_that_leaves_early_leaves_no_state_of_steps_in_flight() -> None:
    bench = StateBench(depth=3)
    bench.submit(1, prompt_of(30), max_tokens=1)
    assert bench.plan()
    bench.planner.abort(1)
    bench.finish()
    assert bench.states._tree.num_snapshots == 0
    bench.states.check()


def test_a_retracted_row_goes_on_where_its_last_page_was_full() -> None:
    bench = StateBench()
    for number in (1, 2):
        bench.submit(number, prompt_of(9, seed=number), max_tokens=30, ignore_eos=True)
    for _ in range(16):
        bench.step()
    assert bench.planner._retract_one()
    bench.finish()
    assert bench.streams == bench.expected
    (again,) = bench.steps[16].admissions
    assert (again.num_computed_tokens, len(again.token_ids) // 4) == (20, 24)


def test_slots_that_rows_hold_are_not_taken_from_them() -> None:
    bench = StateBench(num_slots=2)
    for number in range(4):
        bench.submit(number, prompt_of(9, seed=number), max_tokens=30, ignore_eos=True)
    bench.finish()
    bench.states.check()
    assert bench.streams == bench.expected


def test_all_snapshots_are_lost_with_the_device() -> None:
    bench = StateBench()
    bench.serve(1, prompt_of(30))
    bench.submit(2, prompt_of(30), max_tokens=12, ignore_eos=True)
    for _ in range(7):
        bench.step()
    lose_the_device(bench)
    bench.states.check()
    assert bench.states._slots.num_held == 0
    bench.finish()
    assert bench.streams == bench.expected
    assert bench.serve(3, prompt_of(30)) == 28


def test_a_prompt_whose_tokens_are_all_scored_starts_at_its_beginning() -> None:
    bench = StateBench()
    bench.serve(1, prompt_of(30))
    assert bench.serve(2, prompt_of(30), prompt_logprobs=0) == 0
    assert copies(bench.steps[-1])[0] == []
