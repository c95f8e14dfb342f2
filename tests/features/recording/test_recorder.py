"""The ring is bounded, files are written when something is wrong, and a recorder never ends an engine."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.actors.actor import Mailbox
from engine.features.recording import recorder as module
from engine.features.recording.file import read_recording
from engine.features.recording.replay import Replay
from engine.messages import StepDone
from engine.plugins.eviction.lru import LeastRecentlyUsed
from engine.scheduling.pages import PageManager
from engine.types.notices import ExecutorsLost
from tests.features.recording.driver import Driver

LIMIT = 20_000


def whys(driver: Driver) -> list[str]:
    return [path.name.split("-", 1)[1].rpartition("-")[0] for path in driver.written()]


def test_the_ring_stays_within_its_limit_and_its_state_follows(tmp_path: Path) -> None:
    driver = Driver(tmp_path, limit_bytes=LIMIT)
    sizes = []
    for _ in range(20):
        driver.run(2)
        sizes.append(driver.recorder._num_bytes)
    assert max(sizes) < 2 * LIMIT
    assert driver.recorder._behind is not None
    assert not driver.recorder._is_off


def test_lost_executors_leave_a_file_and_not_one_for_each_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    driver.run(2, losses=1)
    assert whys(driver) == ["executors-lost"]
    driver.run(2, losses=2)
    assert whys(driver) == ["executors-lost"], "a minute has not passed"
    for _ in range(5):
        driver.now += 61
        driver.run(1, losses=1)
        driver.written()
    assert len(whys(driver)) == 6
    monkeypatch.setattr(module, "MOST_FILES", 3)
    oldest = driver.written()[-2]
    driver.now += 61
    driver.run(1, losses=1)
    assert len(whys(driver)) == 3
    assert driver.written()[0] == oldest


def test_those_that_are_asked_for_are_bounded_and_push_out_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    driver = Driver(tmp_path)
    driver.run(1, losses=1)
    alerts = driver.written()
    for number in range(8):
        name = f"20260101T00000000{number}-asked-1.cbr"
        assert driver.recorder.write("asked", name).result(60) == ""
    asked = [path for path in driver.written() if path not in alerts]
    assert [path.name[:18] for path in asked] == [f"20260101T00000000{number}" for number in (5, 6, 7)]
    assert set(alerts) < set(driver.written())


def test_a_loss_that_is_no_fault_leaves_none(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.tell(ExecutorsLost(reason="too large a step", is_fault=False))
    assert whys(driver) == []


def test_pages_that_nobody_uses_and_nobody_gives_back_leave_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    release = PageManager.release

    def leak(self: PageManager, row: int) -> None:
        self._table.num_pages[row] -= self._table.num_pages[row] > self._handles[row].num_pages
        release(self, row)

    driver.run(1)
    assert whys(driver) == []
    monkeypatch.setattr(PageManager, "release", leak)
    driver.run(1)
    assert whys(driver) == ["pages-lost"]


def test_a_step_or_a_request_that_waits_too_long_leaves_a_file(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "stalled")
    driver.tell(driver.request())
    driver.now += 31
    driver.finish_step()
    assert whys(driver) == ["stalled"]
    late = Driver(tmp_path / "waited", waited_s=0.2)
    late.run(5)
    assert whys(late) == ["waited"]


async def test_a_crash_is_the_last_turn_of_the_last_file(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(1)
    driver.tell(driver.request())

    scheduler = driver.scheduler
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    inbox: Mailbox[Any] = scheduler.inbox
    inbox.put(StepDone(rank=0, step_id=10**6, token_ids=b""))
    with pytest.raises(ExceptionGroup):
        await running
    assert whys(driver) == ["died"]
    recording = read_recording(driver.written()[0])
    assert recording.turns[-1].failure.startswith("AssertionError: step 1000000 completed")
    replay = Replay(recording)
    list(replay)
    assert replay.fault == recording.turns[-1].failure


def test_files_that_are_asked_for_at_once_are_written_one_after_the_other(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(3)
    driver.recorder.write("asked", "../one.cbr")
    driver.recorder.write("asked", "two.cbr")
    assert [path.name for path in driver.written()] == ["one.cbr", "two.cbr"]
    for number in range(100):
        driver.recorder.write("asked", f"{number:03}.cbr")
    assert len(driver.written()) < 20


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    driver = Driver(tmp_path / "file")
    driver.run(1, losses=1)
    assert driver.written() == []
    assert "was not written" in caplog.text


def test_a_disk_without_room_for_a_whole_file_keeps_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    driver = Driver(tmp_path)
    driver.run(1)
    monkeypatch.setattr("engine.features.recording.file._parts", full)
    assert driver.recorder.write("asked").result() == "No space left on device"
    assert not list(driver.recorder.folder.iterdir())
    assert "was not written" in caplog.text
    monkeypatch.undo()
    assert driver.recorder.write("asked").result() == ""
    assert len(driver.written()) == 1


def test_a_plugin_that_cannot_be_followed_turns_the_recorder_off_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moods = iter(range(10**9))
    monkeypatch.setattr(LeastRecentlyUsed, "rank", lambda self, candidate: (next(moods) * 7919 % 101,))
    driver = Driver(tmp_path, limit_bytes=LIMIT, names={"eviction": "lru", "policy": "priority"})
    with caplog.at_level(logging.ERROR):
        driver.run(20)
        assert "the flight recorder is off" in caplog.text
        driver.recorder.write("asked")
    assert driver.written() == []
    assert driver.num_requests > 20
