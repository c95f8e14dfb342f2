"""Speculation changes no token and leaks no page, whatever a proposer says."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.features.speculation.guesses import TOLD_AT_ONCE
from engine.features.speculation.messages import (
    NAME,
    drafted_of,
    drafted_part,
    most_places_of,
    proposals_of,
    result_by_row,
    result_of_rows,
    with_other_tokens,
)
from engine.features.speculation.overlaps import Overlaps
from engine.features.speculation.payoff import Payoff
from engine.features.speculation.planner import SpeculationPlanner, drafts_of
from engine.messages import Finish, Step
from engine.scheduling.proposer import DraftModel
from engine.scheduling.step_builder import NO_APPENDS, InFlight, Wave
from server.extensions.chaos.sim.liars import KINDS, Everything, Liar, LiarSession
from tests.scheduling.bench import Bench, lose_the_device, prompt_of
from tests.scheduling.fake_device import VOCAB, FakeDevice, next_token


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, everything proposed is verified."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)


def liar(kind: str, num: int = 4) -> Liar:
    return Liar(kind, lambda tokens: next_token(np.array(tokens)), VOCAB, num)


def bench_of(liar: Liar, *, drafted: bool, **numbers: int) -> Bench:
    """A bench with a liar.  drafted: it is the device's draft model, and not the scheduler's proposer."""
    if not drafted:
        return Bench(proposer=liar, **numbers)
    bench = Bench(proposer=DraftModel(path="", num_tokens=liar.num_tokens, max_len=1000), **numbers)
    bench.device.draft = liar.draft
    return bench


def counting_bench(kind: str, num: int = 4, **numbers: int) -> Bench:
    """A bench whose device drafts, and counts which drafted tokens were right."""
    bench = bench_of(liar(kind, num), drafted=True, **numbers)
    bench.device.counts = True
    return bench


def num_counted(bench: Bench) -> int:
    """The number of steps that were planned before the tokens of the step in front were known."""
    return sum(bool(proposals_of(step).counted) for step in bench.steps)


def right(bench: Bench) -> None:
    bench.finish()
    for request_id, stream in bench.streams.items():
        assert stream == bench.expected[request_id], f"request {request_id}"


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_those_of_a_run_without_proposals(kind: str, page_size: int, drafted: bool) -> None:
    for depth, num in ((1, 1), (2, 1), (2, 3), (3, 8)):
        sizes = {"depth": depth, "page_size": page_size, "num_pages": 256 // page_size}
        bench = bench_of(liar(kind, num), drafted=drafted, **sizes)
        for request_id in range(7):
            bench.submit(request_id, prompt_of(3 + 5 * request_id, seed=request_id % 3), max_tokens=1 + 6 * request_id)
        right(bench)
        rows = sum(map(len, bench.streams.values()))
        if kind in ("right", "many") and num > 1:
            assert bench.device.num_steps < rows / 2
        meter = bench.planner.meter
        assert meter.num_output_tokens == rows
        assert sum(meter.proposed_at) >= sum(meter.accepted_at) > -1
        assert len(meter.proposed_at) <= num
        if kind == "right":
            assert meter.proposed_at == meter.accepted_at != []


def test_a_stop_token_among_the_accepted_ones_ends_the_request_there() -> None:
    bench = Bench(proposer=liar("right"))
    prompt = prompt_of(9)
    tokens = prompt.tolist()
    for _ in range(12):
        tokens.append(next_token(np.array(tokens)))
    bench.submit(1, prompt, max_tokens=40, stop_token_ids=(tokens[-1],))
    right(bench)
    assert bench.ends[1] == [Finish.STOP]
    assert len(bench.streams[1]) == 12


def test_nobody_is_proposed_more_than_they_may_say() -> None:
    bench = Bench(page_size=1, num_pages=64, max_len=32, max_running=1, proposer=liar("right", 8))
    bench.submit(1, prompt_of(20), max_tokens=12)
    right(bench)
    ends = [proposals_of(step).columns()[1][-1] for step in bench.steps if NAME in step.parts]
    assert ends
    assert max(ends) < 31  # the token behind the last proposal is the last one


@pytest.mark.parametrize(("kind", "drafted"), [("right", False), ("half", False), ("half", True)])
def test_retraction_under_proposals_loses_no_token(kind: str, drafted: bool) -> None:
    bench = bench_of(liar(kind), drafted=drafted, page_size=4, num_pages=24, max_running=4, max_len=64)
    bench.expect_short_outputs()
    for request_id in range(6):
        bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=40, ignore_eos=True)
    right(bench)
    assert bench.planner.meter.num_retractions > 0
    assert sum(bench.planner.meter.accepted_at) > 0


@pytest.mark.parametrize("drafted", [False, True])
def test_a_lost_device_and_aborts_leave_nothing_behind(drafted: bool) -> None:
    bench = bench_of(liar("half"), drafted=drafted)
    for request_id in range(4):
        bench.submit(request_id, prompt_of(20, seed=request_id), max_tokens=30, ignore_eos=True)
    for _ in range(4):
        bench.step()
    bench.plan()
    lose_the_device(bench)
    while len(bench.streams[0]) < 12:
        bench.step()
    bench.plan()
    bench.planner.abort(2)
    bench.read()
    bench.streams.pop(2)
    bench.finish()
    assert bench.ends[2] == [Finish.ABORT]
    assert all(bench.streams[one] == bench.expected[one] for one in (0, 1, 3))


def test_pages_of_what_was_rejected_are_not_shared() -> None:
    bench = Bench(page_size=1, num_pages=64, proposer=liar("wrong", 8))
    bench.submit(1, prompt_of(6), max_tokens=6, ignore_eos=True)
    right(bench)
    assert bench.planner.stats().pages_cached == 11  # the last token is never computed
    bench.submit(2, np.array([*prompt_of(6), *bench.expected[1]], dtype=np.int32), max_tokens=5)
    right(bench)
    assert bench.cached[2] == 11


def test_who_has_penalties_or_a_grammar_is_decoded() -> None:
    bench = Bench(proposer=liar("right"))
    bench.submit(1, prompt_of(6), max_tokens=9, frequency_penalty=0.5)
    bench.submit(2, prompt_of(7), max_tokens=9, allowed_token_ids=(1, 2))
    right(bench)
    assert not any(NAME in step.parts for step in bench.steps)


def test_a_proposer_that_raises_is_not_asked_again_for_that_request() -> None:
    class Broken(Liar):
        def open(self) -> object:  # type: ignore[override]
            raise SystemExit(1)

    bench = Bench(proposer=Broken("right", lambda tokens: 0, VOCAB))
    bench.submit(1, prompt_of(6), max_tokens=9)
    right(bench)
    assert not any(NAME in step.parts for step in bench.steps)


def test_prompts_that_come_together_are_not_told_to_their_sessions_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(LiarSession, "extend", lambda self, token_ids: told.append(len(token_ids)))
    bench = Bench(
        proposer=liar("wrong"), max_len=600, num_pages=1024, max_running=8, max_step_tokens=4096, prefill_chunk=512
    )
    for request_id in range(8):
        bench.submit(request_id, prompt_of(400, seed=request_id), max_tokens=150, ignore_eos=True)
    most = 0
    while bench.plan() or bench.deliver():
        most = max(most, sum(told))
        told.clear()
    assert TOLD_AT_ONCE <= most <= TOLD_AT_ONCE + 8 * 5
    assert all(bench.streams[one] == bench.expected[one] for one in range(8))


@pytest.mark.parametrize("kind", ["right", "half", "wrong", "moody"])
def test_steps_that_verify_overlap_where_the_device_counts(kind: str) -> None:
    for depth, num, page_size in ((2, 1, 16), (3, 4, 1)):
        bench = counting_bench(kind, num, depth=depth, page_size=page_size, num_pages=512 // page_size)
        for request_id in range(5):
            bench.submit(request_id, prompt_of(3 + 5 * request_id, seed=request_id % 3), max_tokens=1 + 11 * request_id)
        right(bench)
        assert num_counted(bench) > len(bench.steps) / (3 if kind == "right" else 8)


def test_a_stop_and_a_lost_device_under_steps_that_overlap() -> None:
    bench = counting_bench("half", page_size=4, num_pages=128, max_running=4, max_len=64)
    tokens = prompt_of(8, seed=1).tolist()
    for _ in range(20):
        tokens.append(next_token(np.array(tokens)))
    for request_id in range(6):
        stops = (tokens[-1],) if request_id == 1 else ()
        bench.submit(request_id, prompt_of(8, seed=request_id), max_tokens=40, ignore_eos=True, stop_token_ids=stops)
    for _ in range(30):
        if num_counted(bench):
            break
        bench.plan() or bench.deliver()
    assert bench.planner.num_in_flight == 2
    lose_the_device(bench)
    right(bench)
    assert bench.ends[1] == [Finish.STOP]
    assert num_counted(bench) > 4


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"min_tokens": 3}, {"frequency_penalty": 0.5}])
def test_rows_that_the_host_samples_keep_steps_from_overlapping(params: dict[str, object]) -> None:
    bench = counting_bench("right")
    bench.submit(1, prompt_of(6), max_tokens=30, ignore_eos=True)
    bench.submit(2, prompt_of(7), max_tokens=30, ignore_eos=True, **params)
    right(bench)
    assert num_counted(bench) == 0


def _too_few_planned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overlaps, "num_sampling", lambda self, rows: np.zeros_like(rows))


def _pages_of_known_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpeculationPlanner, "_grow", lambda self, rows: NO_APPENDS)


def _length_stays(patch: pytest.MonkeyPatch) -> None:
    def stays(self: SpeculationPlanner, record: InFlight, seconds: float) -> None:
        table = self._table
        before = table.num_planned.copy(), table.num_computed.copy()
        completed(self, record, seconds)
        table.num_planned[:], table.num_computed[:] = before

    completed = SpeculationPlanner.completed
    patch.setattr(SpeculationPlanner, "completed", stays)


def _all_are_right(patch: pytest.MonkeyPatch) -> None:
    def waves(self: SpeculationPlanner, record: InFlight, wave: Wave) -> list[Wave]:
        for row, proposed in drafts_of(record).items():
            at = np.flatnonzero(wave.rows == row)[: len(proposed)]
            self._drafted[row] = wave.tokens[at].tobytes()
        return found(self, record, wave)

    found = SpeculationPlanner.waves
    patch.setattr(SpeculationPlanner, "waves", waves)


@pytest.mark.parametrize("mistake", [_too_few_planned, _pages_of_known_tokens, _length_stays, _all_are_right])
def test_a_mistake_in_steps_that_overlap_is_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    bench = counting_bench("half", page_size=4, num_pages=128)
    for request_id in range(4):
        bench.submit(request_id, prompt_of(9, seed=request_id), max_tokens=40, ignore_eos=True)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        right(bench)


def test_a_token_that_is_sent_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose count stays behind runs the last token of a row again."""
    bench = counting_bench("right", page_size=4, num_pages=128)
    run = FakeDevice.run

    def behind(self: FakeDevice, step: Step) -> None:
        run(self, step)
        self._lengths[np.unique(proposals_of(step).columns()[0])] -= 1

    monkeypatch.setattr(FakeDevice, "run", behind)
    bench.submit(1, prompt_of(9), max_tokens=40, ignore_eos=True)
    with pytest.raises(AssertionError):
        right(bench)


def test_what_ranks_can_count_stays_in_recordings() -> None:
    """A planner that plays one must plan what was planned, also without true tokens or with fewer requests."""
    part = drafted_part({1: b"abcd", 2: b"efgh"}, 64)
    hidden = with_other_tokens(part, lambda tokens: tokens[::-1])
    assert (drafted_of(hidden), most_places_of(hidden)) == ({1: b"dcba", 2: b"hgfe"}, 64)
    fewer = result_of_rows({5: result_by_row(part)[2]})
    assert (drafted_of(fewer), most_places_of(fewer)) == ({5: b"efgh"}, 64)
