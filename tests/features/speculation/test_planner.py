"""Speculation changes no token and leaks no page, whatever a proposer says."""

import numpy as np
import pytest

from engine.features.speculation.guesses import TOLD_AT_ONCE
from engine.features.speculation.messages import NAME, proposals_of
from engine.features.speculation.payoff import Payoff
from engine.messages import Finish
from engine.scheduling.proposer import DraftModel
from server.extensions.chaos.sim.liars import KINDS, Everything, Liar, LiarSession
from tests.scheduling.bench import Bench, lose_the_device, prompt_of
from tests.scheduling.fake_device import VOCAB, next_token


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
