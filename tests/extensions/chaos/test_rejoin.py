"""Clients get their streams once and whole, whatever becomes of the server; the simulation that shows it finds bugs."""

from collections import Counter

import pytest

from server.extensions.chaos.bugs import Bug, all_bugs
from server.extensions.chaos.campaign import hunt
from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.rejoin.disk import SimDisk, SimSegments
from server.extensions.chaos.worlds import KINDS

REJOIN = KINDS["rejoin"]
BUGS = [bug for bug in all_bugs().values() if bug.kind == "rejoin"]
NUM_SEEDS = 120
SEEN = ("server came back", "stream rejoined", "start refused")
FAULTS = ("Kill", "Power", "Full", "Away", "Late", "Unsynced", "FullAtEnd")


def never() -> float:
    return 0.0


def always() -> float:
    return 0.999


def frames(disk: SimDisk) -> list[list[bytes]]:
    """The frames that the next process reads."""
    segments = SimSegments(disk)
    return [frame for number in segments.sizes for frame in segments.read(number)]


def test_what_was_written_outlasts_a_kill_and_what_was_synced_a_loss_of_power() -> None:
    disk = SimDisk()
    segments = SimSegments(disk)
    segments.begin()
    segments.write([b"one"])
    segments.unsynced()()
    segments.write([b"two"])
    assert frames(disk.after_kill()) == [[b"one"], [b"two"]]
    assert frames(disk.after_power_loss(never)) == [[b"one"]]
    assert frames(disk.after_power_loss(always)) == [[b"one"], [b"two"]]
    assert segments.num_bytes == sum(file.num_bytes for file in disk.files.values())


def test_a_new_file_may_be_missing_and_a_removed_one_may_be_back_until_the_folder_is_synced() -> None:
    disk = SimDisk()
    segments = SimSegments(disk)
    segments.begin()
    segments.write([b"old"])
    segments.unsynced()()
    copied = segments.reserve()
    segments.begin()
    segments.sizes[copied] = segments.copy(copied, [[b"old"]], is_synced=False)
    segments.remove(1)
    assert frames(disk.after_power_loss(never)) == []
    assert [b"old"] in frames(disk.after_power_loss(always))
    segments.unsynced()()
    assert sorted(disk.files) == [copied, segments.current]


def test_a_full_disk_takes_nothing() -> None:
    disk = SimDisk()
    segments = SimSegments(disk)
    segments.begin()
    disk.is_full = True
    with pytest.raises(OSError, match="No space left"):
        segments.write([b"one"])
    assert frames(disk) == []


def test_a_client_that_was_away_gets_each_token_once() -> None:
    words = REJOIN.operations(0)
    asked = next(number for number, word in words.items() if "request" in word)
    ledger = Ledger()
    run = REJOIN.play(0, [asked], ledger=ledger)
    assert (run.num_asked, run.num_ended, run.found_by, run.faults) == (1, 1, "", {})


@pytest.mark.slow
def test_streams_are_whole_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        run = REJOIN.play(seed)
        assert not run.found_by, f"callboard chaos --kind rejoin --only {seed}: {run}"
        seen.update(run.scarce)
        seen.update(run.faults)
    missing = [name for name in (*SEEN, *FAULTS) if not seen[name]]
    assert not missing, f"the sweep is void, these never happened: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_journal_is_found_and_is_what_was_found(bug: Bug) -> None:
    failed = hunt(bug)
    assert failed is not None
    assert not REJOIN.play(failed.seed).found_by, f"seed {failed.seed} fails without {bug.name} too"
