"""A bug of the scheduler is found from the file alone, and few operations are left of the recording."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.features.recording.file import read_recording, write_recording
from engine.features.recording.replay import Replay
from engine.features.recording.shrinking import play_ops, shrunk, story_of
from engine.features.speculation.messages import NAME, drafted_of, drafted_part
from engine.messages import Step, StepDone
from engine.plugins.blueprint import Blueprint
from engine.scheduling.pages import PageManager
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.rows import PlannerLimits
from engine.types.notices import Reconfigure
from server.extensions.chaos.sim.mutants import (
    Mutant,
    a_page_is_freed_twice,
    a_page_leaks_when_a_row_is_released,
    an_unlock_is_missed,
)
from tests.features.recording.driver import Driver
from tests.scheduling.fake_device import FakeDevice

pytestmark = pytest.mark.slow

MANY = 50
BUGS = (a_page_is_freed_twice, a_page_leaks_when_a_row_is_released, an_unlock_is_missed)


@pytest.mark.parametrize("mutant", BUGS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_from_the_file_and_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.setattr(mutant.owner, mutant.method, mutant.made(getattr(mutant.owner, mutant.method)))
    driver = Driver(tmp_path, names={"eviction": "lru", "policy": "priority"})
    driver.recorder.alert = lambda why: None  # type: ignore[method-assign]
    with suppress(AssertionError):  # the device or the scheduler may notice
        driver.run(6)
    driver.recorder.write("test")
    (path,) = driver.written()

    recording = read_recording(path)
    replay = Replay(recording)
    list(replay)
    assert replay.fault, "the file alone shows that something does not hold"
    found = shrunk(recording, 30.0)
    assert found is not None
    small, fault, num_ops = found
    assert sum(len(turn.messages) for turn in small.turns) < min(MANY, num_ops)
    write_recording(tmp_path / "small.cbr", small.header, small.state, map(msgspec.msgpack.encode, small.turns))
    again = Replay(read_recording(tmp_path / "small.cbr"))
    assert [turn.differs for turn in again if turn.differs is not None] == []
    assert again.fault == fault

    monkeypatch.undo()
    mended = Replay(read_recording(tmp_path / "small.cbr"))
    list(mended)
    assert not mended.fault, "without the bug nothing fails"


def test_a_bug_behind_a_state_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = PageManager.release

    def late_leak(self: PageManager, row: int) -> None:
        if self._table.request_ids[row] >= 40 and self._table.num_pages[row] > self._handles[row].num_pages:
            self._table.num_pages[row] -= 1
        release(self, row)

    monkeypatch.setattr(PageManager, "release", late_leak)
    driver = Driver(tmp_path, names={"eviction": "lru", "policy": "priority"}, limit_bytes=30_000)
    driver.recorder.alert = lambda why: None  # type: ignore[method-assign]
    while driver.num_requests < 45:
        driver.run(1)
    driver.recorder.write("test")
    (path,) = driver.written()
    recording = read_recording(path)
    assert recording.state
    found = shrunk(recording, 20.0)
    assert found is not None
    assert sum(len(turn.messages) for turn in found[0].turns) < MANY
    again = Replay(found[0])
    list(again)
    assert again.fault == found[1]


def chunk_of(message: Reconfigure) -> int:
    return msgspec.msgpack.decode(message.blueprint, type=Blueprint).limits.prefill_chunk


@pytest.mark.parametrize("renews", [False, True])
def test_a_bug_that_a_change_of_settings_brings_is_found_and_the_change_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renews: bool
) -> None:
    release, retune, build = PageManager.release, Planner.retune, Planner.__init__
    broken: list[PageManager] = []

    def noted(planner: Planner, limits: PlannerLimits) -> None:
        if limits.prefill_chunk == 8:
            broken.append(planner.pages)

    def retuned(self: Planner, limits: PlannerLimits, policy: SchedulingPolicy) -> None:
        retune(self, limits, policy)
        noted(self, limits)

    def built(self: Planner, limits: PlannerLimits, *others: Any, **named: Any) -> None:
        build(self, limits, *others, **named)
        noted(self, limits)

    def leak(self: PageManager, row: int) -> None:
        if any(self is one for one in broken) and self._table.num_pages[row] > self._handles[row].num_pages:
            self._table.num_pages[row] -= 1
        release(self, row)

    monkeypatch.setattr(Planner, "retune", retuned)
    monkeypatch.setattr(Planner, "__init__", built)
    monkeypatch.setattr(PageManager, "release", leak)
    driver = Driver(tmp_path, names={"eviction": "lru", "policy": "priority"})
    driver.recorder.alert = lambda why: None  # type: ignore[method-assign]
    driver.run(1)
    first = driver.blueprint
    changed = msgspec.structs.replace(first, limits=replace(first.limits, prefill_chunk=8))
    driver.change(changed, renews=renews)
    if not renews:  # nothing arrives between two changes
        other = replace(first.limits, prefill_chunk=12)
        driver.change(msgspec.structs.replace(first, limits=other), renews=False)
    driver.run(6)
    driver.recorder.write("test")
    found = shrunk(read_recording(driver.written()[0]), 20.0)
    assert found is not None
    small, fault, _ = found
    assert [
        chunk_of(message) for turn in small.turns for message in turn.messages if isinstance(message, Reconfigure)
    ] == [8]
    assert sum(len(turn.messages) for turn in small.turns) < MANY
    write_recording(tmp_path / "small.cbr", small.header, small.state, map(msgspec.msgpack.encode, small.turns))
    again = Replay(read_recording(tmp_path / "small.cbr"))
    assert [turn.differs for turn in again if turn.differs is not None] == []
    assert again.fault == fault


def test_what_a_draft_model_proposed_is_part_of_what_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeDevice.run

    def drafting(self: FakeDevice, step: Step) -> None:
        run(self, step)
        rows = np.frombuffer(step.decode_rows, np.int32).tolist()
        done = self.done.pop()
        by_row = {row: np.array([step.step_id, row], np.int32).tobytes() for row in rows}
        self.done.append(msgspec.structs.replace(done, parts={NAME: drafted_part(by_row)} if rows else {}))

    monkeypatch.setattr(FakeDevice, "run", drafting)
    driver = Driver(tmp_path)
    driver.run(2)
    driver.recorder.write("test")
    recording = read_recording(driver.written()[0])
    story = story_of(recording)
    fault, turns = play_ops(recording, story, story.ops)
    assert not fault
    recorded, played = (
        [
            drafted_of(one.parts[NAME])
            for turn in them
            for one in turn.messages
            if isinstance(one, StepDone) and one.parts
        ]
        for them in (recording.turns, turns)
    )
    assert len(played) == len(recorded) > 10
    # What belongs to a request that has ended meanwhile has no place.
    assert all(again.items() <= once.items() for again, once in zip(played, recorded, strict=True))
    assert sum(map(len, played)) > sum(map(len, recorded)) / 2


def test_where_nothing_fails_there_is_nothing_to_shrink(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(1)
    driver.recorder.write("test")
    assert shrunk(read_recording(driver.written()[0]), 5.0) is None
