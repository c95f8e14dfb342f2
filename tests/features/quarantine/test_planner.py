"""A request that ends every executor is found by elimination: it ends, and all others go on with the same tokens."""

import numpy as np
import pytest

from engine.features.quarantine.suspects import LOSSES_TO_SUSPECT
from engine.messages import Finish
from engine.types.notices import LossExplained
from server.extensions.chaos.sim.probe import quarantine_of
from tests.scheduling.bench import Bench, lose_the_device, prompt_of


def run_until_lost(bench: Bench, poison: int, at_output: int) -> bool:
    """Run until a step would compute token ``at_output`` of ``poison``, which ends the device.  False: all is done."""
    while True:
        if bench.planner.num_in_flight < bench.depth and (step := bench.planner.next_step()) is not None:
            rows = np.frombuffer(step.decode_rows + step.prefill_rows, dtype=np.int32).tolist()
            requests = bench.planner.table.request_ids[rows].tolist()
            bench.groups.append(requests)  # type: ignore[attr-defined]
            if poison in requests:
                row = rows[requests.index(poison)]
                samples = bench.planner.table.num_computed[row] >= bench.prompts[poison] + at_output  # type: ignore[attr-defined]
                if samples:
                    return True
            bench.device.run(step)
        elif not bench.deliver():
            return False


def poisoned(**settings: int) -> Bench:
    bench = Bench(prefill_chunk=8, **settings)
    bench.groups, bench.prompts = [], {}  # type: ignore[attr-defined]
    for request, length in ((1, 20), (2, 9), (3, 5), (4, 13)):
        bench.prompts[request] = length  # type: ignore[attr-defined]
        bench.submit(request, prompt_of(length, seed=request), max_tokens=12, ignore_eos=True)
    return bench


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_output", [0, 1, 5])
@pytest.mark.parametrize("max_running", [2, 4])
def test_the_request_that_ends_executors_ends_and_the_others_are_whole(
    depth: int, at_output: int, max_running: int
) -> None:
    bench, poison = poisoned(depth=depth, max_running=max_running), 3
    found = []
    while run_until_lost(bench, poison, at_output):
        before = bench.planner.num_open
        bench.device.done.clear()
        found.append(lose_the_device(bench) is not None)
        bench.read()
        assert bench.planner.num_open == before - found[-1]
    assert found == [False] * LOSSES_TO_SUSPECT + [True]
    assert bench.ends.pop(poison) == [Finish.ERROR]
    stream, expected = bench.streams.pop(poison), bench.expected.pop(poison)
    assert stream == expected[: len(stream)]
    assert bench.streams == bench.expected
    assert all(ends == [Finish.LENGTH] for ends in bench.ends.values())
    assert not quarantine_of(bench.planner)._records


def test_suspects_run_one_at_a_time_and_new_requests_wait_for_them() -> None:
    bench = poisoned(depth=2)
    for _ in range(LOSSES_TO_SUSPECT):
        assert bench.plan(), "every one of the four is in the step"
        lose_the_device(bench)
    bench.submit(5, prompt_of(6, seed=5), max_tokens=4, ignore_eos=True, priority=-9)
    assert not run_until_lost(bench, poison=0, at_output=0)
    bench.read()
    groups = [set(one) for one in bench.groups]  # type: ignore[attr-defined]
    together = next(index for index, one in enumerate(groups) if len(one) > 1)
    assert set.union(*groups[:together]) == {1, 2, 3, 4}, "each of them, and not the new one, urgent as it is"
    assert bench.streams == bench.expected


def test_losses_that_a_request_gets_past_say_nothing_about_it() -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(5), max_tokens=9, ignore_eos=True)
    for _ in range(3):
        bench.step()
        bench.step()
        bench.plan()
        assert not lose_the_device(bench), "it has decoded a token each time"
        assert not quarantine_of(bench.planner).is_on
    bench.finish()
    assert bench.streams == bench.expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_fails_wherever_it_decodes_is_found_although_each_prefill_gets_it_further(depth: int) -> None:
    bench, poison = poisoned(depth=depth), 3
    found = []
    while not any(found):
        while True:
            if bench.planner.num_in_flight < bench.depth and (step := bench.planner.next_step()) is not None:
                decoding = np.frombuffer(step.decode_rows, dtype=np.int32)
                if poison in bench.planner.table.request_ids[decoding]:
                    break
                bench.device.run(step)
            else:
                assert bench.deliver(), "it is found before all is done"
        bench.device.done.clear()
        found.append(lose_the_device(bench))
        bench.read()
        assert len(found) < 5
    assert bench.ends.pop(poison) == [Finish.ERROR]
    stream, expected = bench.streams.pop(poison), bench.expected.pop(poison)
    assert stream == expected[: len(stream)]
    del bench.metrics[poison]
    bench.finish()
    assert bench.streams == bench.expected


def test_whether_executors_work_at_all_is_told_with_each_request_that_is_blamed() -> None:
    bench = Bench(depth=1)
    told = []
    for request, healthy_first in ((1, False), (2, False), (3, True)):
        if healthy_first:
            bench.submit(9, prompt_of(5, seed=9), max_tokens=1, ignore_eos=True)
            bench.finish()
        bench.submit(request, prompt_of(5, seed=request), max_tokens=3, ignore_eos=True)
        for _ in range(LOSSES_TO_SUSPECT + 1):
            bench.plan()
            explained = lose_the_device(bench)
        bench.read()
        told.append(explained)
    assert told == [LossExplained(num_losses=3, executors_work=works) for works in (False, False, True)]


def test_losses_that_are_no_fault_blame_nobody() -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(5), max_tokens=3, ignore_eos=True)
    for _ in range(6):
        bench.plan()
        # As the executors tell it: ranks that were left waiting may be heard first.
        assert not lose_the_device(bench)
        assert not bench.planner.restart(is_fault=False)
        assert not quarantine_of(bench.planner).is_on
    bench.finish()
    assert bench.streams == bench.expected


def test_a_loss_between_steps_blames_nobody() -> None:
    bench = Bench(depth=1)
    bench.submit(1, prompt_of(5), max_tokens=3, ignore_eos=True)
    bench.step()
    assert [lose_the_device(bench) for _ in range(5)] == [None] * 5
    bench.finish()
    assert bench.streams == bench.expected


@pytest.mark.parametrize("which", ["alone", "waiting"])
def test_a_suspect_can_be_cancelled(which: str) -> None:
    bench = Bench(depth=1)
    for request in (1, 2):
        bench.submit(request, prompt_of(5, seed=request), max_tokens=3, ignore_eos=True)
    for _ in range(LOSSES_TO_SUSPECT):
        bench.plan()
        lose_the_device(bench)
    bench.plan()
    assert quarantine_of(bench.planner).alone is not None
    alone = quarantine_of(bench.planner).alone.request_id
    gone = alone if which == "alone" else 3 - alone
    bench.planner.abort(gone)
    bench.finish()
    assert bench.ends[gone] == [Finish.ABORT]
    assert bench.streams[3 - gone] == bench.expected[3 - gone]
