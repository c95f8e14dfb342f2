"""`callboard chaos`: runs of every kind pass, planted bugs are found by the log alone, a failure becomes short."""

import json
from pathlib import Path

import pytest

from server.cli import main
from server.extensions.chaos import arguments
from server.extensions.chaos.bugs import ISSUES, Bug, all_bugs
from server.extensions.chaos.campaign import hunt, shrunk
from server.extensions.chaos.checker import main as check_file
from server.extensions.chaos.recorded import disturbed
from server.extensions.chaos.sim.mutants import a_page_is_freed_twice
from server.extensions.chaos.worlds import KINDS, ROTA, kind_of
from tests.features.recording.driver import Driver

BUGS = all_bugs()
FLEET_BUGS = [bug for bug in BUGS.values() if bug.kind == "fleet"]


def test_the_kinds_that_can_be_chosen_are_those_that_there_are() -> None:
    assert set(arguments.KINDS) == set(KINDS) == set(ROTA)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_each_kind_pass(kind: str) -> None:
    for seed in range(4):
        run = KINDS[kind].play(seed)
        assert not run.found_by, run


def test_a_seed_is_a_run() -> None:
    for number in range(len(ROTA)):
        kind, seed = kind_of(number)
        assert kind.play(seed) == kind.play(seed)


def test_the_crash_of_an_actor_explains_that_a_request_ends() -> None:
    run = KINDS["engine"].play(7043, [68, 71])
    assert (run.faults, run.num_ended, run.found_by) == ({"Crash": 1}, 1, "")


def test_each_issue_belongs_to_a_bug_and_there_are_many() -> None:
    assert set(ISSUES) <= set(BUGS)
    assert len(BUGS) >= 30
    assert len(set(ISSUES.values())) >= 20


@pytest.mark.parametrize("bug", FLEET_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_fleet_is_found(bug: Bug) -> None:
    failed = hunt(bug)
    assert failed is not None
    assert not KINDS["fleet"].play(failed.seed).found_by


def test_a_failure_becomes_a_few_operations() -> None:
    bug = BUGS["a_stream_goes_on_a_token_too_early"]
    failed = hunt(bug)
    assert failed is not None
    with bug.mutant.planted():
        small = shrunk(failed, limit_s=10.0)
    assert 1 <= len(small.kept) <= 4
    assert small.run.found_by


def test_the_command_prints_a_run_and_writes_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    with pytest.raises(SystemExit) as ended:
        main(["chaos", "--only", "1", "--log", str(log)])
    assert ended.value.code == 0
    assert "every promise was kept" in capsys.readouterr().out
    assert check_file([str(log)]) == 0
    lines = log.read_text().splitlines()
    missing = next(number for number, line in enumerate(lines) if json.loads(line)["event"] == "end")
    log.write_text("\n".join(lines[:missing] + lines[missing + 1 :]) + "\n")
    assert check_file([str(log)]) == 1


def test_the_bugs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["chaos", "--mutants", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(BUGS)


def test_a_bug_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chaos", "--mutant", "nonsense"])
    assert ended.value.code == 2
    assert "there is no such bug" in capsys.readouterr().err


def test_a_recording_is_replayed_with_faults_and_a_bug_shows(tmp_path: Path) -> None:
    driver = Driver(tmp_path, names={"eviction": "lru", "policy": "priority"})
    driver.run(2)
    driver.recorder.write("test")
    (path,) = driver.written()
    assert disturbed(path, 0)[1].endswith("0 aborts and 0 losses of executors added")
    found = [disturbed(path, seed) for seed in (1, 3, 4)]
    assert not any(fault for fault, _ in found), found
    assert all(" 0 aborts" not in done and " 0 losses" not in done for _, done in found), found
    with a_page_is_freed_twice.planted():
        assert any(disturbed(path, seed)[0] for seed in range(1, 4))
