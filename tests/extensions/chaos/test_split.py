"""Pages move between engines whatever is lost or dies; the simulation that shows it finds planted bugs."""

from collections import Counter

import pytest

from server.extensions.chaos.bugs import Bug, all_bugs
from server.extensions.chaos.campaign import hunt
from server.extensions.chaos.checker import check
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.split.setup import SplitSetup
from server.extensions.chaos.worlds import KINDS

SPLIT = KINDS["split"]
BUGS = [bug for bug in all_bugs().values() if bug.kind == "split"]
NUM_SEEDS = 150
MARKS = (
    "cancelled",
    "d died",
    "executors lost",
    "group damaged",
    "handed over in part",
    "handed over whole",
    "lapsed",
    "message lost",
    "p died",
    "pages landed",
    "router died",
    "row moved",
    "slow link",
    "state landed",
)


def test_a_prompt_moves_whole_where_nothing_disturbs() -> None:
    run = SPLIT.play(next(seed for seed in range(100) if SplitSetup.draw(seed).calm))
    assert not run.found_by, run
    assert run.scarce["handed over whole"]
    assert "handed over in part" not in run.scarce


def test_the_checker_refuses_a_run_that_holds_something_at_its_end() -> None:
    ledger = Ledger()
    SPLIT.play(9, ledger=ledger)
    assert check(ledger.lines)[0] == ""
    at = next(number for number, line in enumerate(ledger.lines) if '"held"' in line)
    ledger.lines[at] = ledger.lines[at].replace("[0, ", "[1, ")
    assert "hold something" in check(ledger.lines)[0]


def test_a_run_may_leave_operations_out() -> None:
    kept = [number for number, words in SPLIT.operations(4).items() if "Ask" in words][:2]
    run = SPLIT.play(4, kept)
    assert (run.num_asked, run.faults, run.found_by) == (2, {}, "")


@pytest.mark.slow
def test_each_request_ends_once_with_its_tokens_and_nothing_is_held_whatever_happens() -> None:
    marks: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        run = SPLIT.play(seed)
        assert not run.found_by, f"callboard chaos --kind split --only {seed}: {run}"
        marks.update(run.scarce)
    missing = [mark for mark in MARKS if not marks[mark]]
    assert not missing, f"the sweep is void, these never happened: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_hand_over_is_found_and_is_what_was_found(bug: Bug) -> None:
    failed = hunt(bug)
    assert failed is not None
    assert not SPLIT.play(failed.seed).found_by, f"seed {failed.seed} fails without {bug.name} too"
