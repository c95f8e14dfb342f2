"""The journal: one write for each turn of the loop, files that come and go, a disk that is full."""

import asyncio
import contextlib
import os
import random
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Delta
from server.extensions.journal import journal as journal_module
from server.extensions.journal import segments
from server.extensions.journal.journal import Entry, Journal
from server.extensions.journal.records import Accepted, Delivered, Ended, decode

MOST_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests take of memory what their records have bytes, so that these small journals are full on disk first."""
    monkeypatch.setattr(journal_module, "ENTRY_BYTES", 0)
    monkeypatch.setattr(journal_module, "NUM_BODIES", 1)
    monkeypatch.setattr(journal_module, "RECORD_BYTES", 0)


def journal_of(folder: Path, **changed: Any) -> Journal:
    return Journal(folder, **{"fsync": "never", "most_bytes": MOST_BYTES, **changed})


def accepted(entry: Entry, body: bytes = b"{}") -> Accepted:
    return Accepted(entry.number, f"r{entry.number}", "", "me", "/v1/x", body, 7, uuid.UUID(int=entry.number), 1.0, "m")


def delivered(entry: Entry, at: int, text: str = "text") -> Delivered:
    return Delivered(entry.number, at, 0, Delta(request_id=1, text=text, token_ids=b"\1\0\0\0"))


async def turn(rounds: int = 3) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


def nothing() -> None: ...


def files_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("*.log")]


def bytes_in(folder: Path) -> int:
    """Returns the bytes of the journal's files, also of one that a thread is writing."""
    num_bytes = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_bytes += path.stat().st_size if path.name != segments.LOCK else 0
    return num_bytes


def known(folder: Path) -> dict[int, list[Any]]:
    """What the next journal finds: number -> records."""
    journal = journal_of(folder)
    found = {number: [decode(record) for record in entry.records] for number, entry in journal.entries.items()}
    journal.close()
    return found


async def test_a_turn_of_the_loop_is_one_write_that_comes_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(tmp_path)
    events: list[str] = []
    real = segments.os.write
    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "write", lambda file, data: (events.append("write"), real(file, data))[1])
        entries = [journal.begin() for _ in range(64)]
        for entry in entries:
            journal.append(entry, accepted(entry), nothing)
            journal.append(entry, delivered(entry, 1), partial(events.append, f"told {entry.number}"))
        await turn()
        assert events == ["write", *(f"told {entry.number}" for entry in entries)]
    journal.close()
    assert known(tmp_path) == {entry.number: [accepted(entry), delivered(entry, 1)] for entry in entries}


async def test_with_fsync_always_nobody_is_told_before_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(tmp_path, fsync="always")
    events: list[str] = []
    real = segments.os.fsync
    monkeypatch.setattr(segments.os, "fsync", lambda file: (events.append("sync"), real(file))[1])
    entry = journal.begin()
    journal.append(entry, accepted(entry), partial(events.append, "first"))
    await turn()
    journal.append(entry, delivered(entry, 1), partial(events.append, "second"))
    while len(events) < 4:
        await asyncio.sleep(0.001)
    assert events == ["sync", "first", "sync", "second"]
    journal.close()


@pytest.mark.parametrize("copy_s", [0, 0.003], ids=["fast disk", "slow disk"])
async def test_files_rotate_and_running_requests_move_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_s: float
) -> None:
    copy = segments.JournalSegments.copy

    def slow_copy(*given: Any, **more: Any) -> int:
        time.sleep(copy_s)
        return copy(*given, **more)

    monkeypatch.setattr(segments.JournalSegments, "copy", slow_copy)
    journal = journal_of(tmp_path)
    forgotten: list[int] = []
    journal.forgotten = lambda entry: forgotten.append(entry.number)
    old = journal.begin()
    journal.append(old, accepted(old), nothing)
    expected = [accepted(old)]
    for at in range(1, 400):
        expected.append(delivered(old, at, f"of the old one {at}"))
        journal.append(old, expected[-1], nothing)
        brief = journal.begin()
        journal.append(brief, accepted(brief, b"x" * 500), nothing)
        journal.end(brief, Ended(brief.number, 1, 1.0), nothing)
        await turn(1)
        assert journal.num_bytes <= MOST_BYTES
    written = asyncio.Event()
    journal.append(old, delivered(old, 400), written.set)
    expected.append(delivered(old, 400))
    await written.wait()  # what waited for a file to be copied too
    while journal._moving is not None:
        await asyncio.sleep(0.001)
    assert journal.num_bytes <= MOST_BYTES
    assert forgotten == sorted(forgotten)
    assert len(forgotten) > 200
    assert len(files_of(tmp_path)) <= journal_module.NUM_SEGMENTS + 1
    journal.close()
    found = known(tmp_path)
    assert found.pop(old.number) == expected
    assert set(found) <= set(range(2, 402)) - set(forgotten)


@pytest.mark.parametrize("fsync", ["always", "interval"])
async def test_the_event_loop_neither_syncs_nor_writes_again_and_removes_what_is_synced_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    monkeypatch.setattr(journal_module, "MEND_EVERY_S", 0.01)
    journal = journal_of(tmp_path, fsync=fsync)
    here, threads, synced = threading.get_ident(), set(), set()
    fsync_of, copy, unlink = os.fsync, segments.JournalSegments.copy, Path.unlink
    removed_before_sync: list[str] = []

    def noted_fsync(file: int) -> None:
        threads.add(threading.get_ident())
        synced.add(Path(f"/proc/self/fd/{file}").readlink().name)
        fsync_of(file)

    def noted_copy(self: segments.JournalSegments, number: int, *given: Any, **more: Any) -> int:
        threads.add(threading.get_ident())
        return copy(self, number, *given, **more)

    def noted_unlink(self: Path, **given: Any) -> None:
        if tmp_path.name not in synced:
            removed_before_sync.append(self.name)
        unlink(self, **given)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(segments.JournalSegments, "copy", noted_copy)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    running = journal.begin()
    for at in range(200):
        told = asyncio.Event()
        journal.append(running, delivered(running, at, "x" * 300) if at else accepted(running), told.set)
        brief = journal.begin()
        journal.append(brief, accepted(brief, b"x" * 500), nothing)
        journal.end(brief, Ended(brief.number, 1, 1.0), told.set)
        await told.wait()
    synced.clear()
    journal._fail(OSError(5, "Input/output error"))
    while journal.is_failing:
        await asyncio.sleep(0.001)
    assert threads
    assert here not in threads
    assert not removed_before_sync
    monkeypatch.undo()
    journal.close()


async def test_what_is_forgotten_does_not_lie_about(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    one, other = journal.begin(), journal.begin()
    for entry in (one, other):
        journal.append(entry, accepted(entry, b"a secret"), nothing)
        journal.end(entry, Ended(entry.number, 1, 1.0), nothing)
    await turn()
    journal.forget(one)
    assert any(b"a secret" in content for content in files_of(tmp_path))
    journal.forget(other)
    assert not any(b"a secret" in content for content in files_of(tmp_path))
    journal.close()


async def test_streams_that_grow_beyond_all_bounds_give_way(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    small, large = journal.begin(), journal.begin()
    for entry in (small, large):
        journal.append(entry, accepted(entry), nothing)
    told = []
    for at in range(1, 400):
        journal.append(large, delivered(large, at, "x" * 500), partial(told.append, at))
        await turn(1)
        assert journal.num_bytes <= MOST_BYTES
    while journal._moving is not None:
        await asyncio.sleep(0.001)
    await turn(400)
    assert told == list(range(1, 400)), "its reader gets all of it"
    assert not large.is_kept
    assert small.is_kept
    assert journal.takes(1000)
    assert not journal.takes(MOST_BYTES // 4), "a body that would fill it"
    journal.close()
    assert known(tmp_path)[small.number] == [accepted(small)]


async def test_what_is_in_memory_is_held_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ENTRY_BYTES", MOST_BYTES // 8)
    journal = journal_of(tmp_path)
    forgotten: list[int] = []
    journal.forgotten = lambda entry: forgotten.append(entry.number)
    running = journal.begin()
    journal.append(running, accepted(running), nothing)
    for number in range(2, 20):
        entry = journal.begin()
        journal.append(entry, accepted(entry), nothing)
        journal.end(entry, Ended(number, 1, 1.0), nothing)
        await turn(1)
    assert set(journal.entries) == {running.number, *range(14, 20)}, "the oldest of those that have ended give way"
    assert forgotten == list(range(2, 14))
    num_taken = 0
    while journal.takes(2):
        entry = journal.begin()
        journal.append(entry, accepted(entry), nothing)
        await turn(1)
        num_taken += 1
    assert num_taken == 2, "those that run may have half of it"
    assert len(journal.entries) == 7
    for at in range(1, 100):
        journal.append(running, delivered(running, at, "x" * 500), nothing)
    await turn()
    assert running.number not in journal.entries, "the longest gives way"
    assert forgotten[-1] == running.number
    journal.close()
    again = journal_of(tmp_path)
    assert len(again.entries) <= 7, "also of what lies on disk still"
    again.close()


async def test_a_full_disk_holds_nobody_up_and_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "MEND_EVERY_S", 0.02)
    journal = journal_of(tmp_path)
    entry, told = journal.begin(), []
    journal.append(entry, accepted(entry), nothing)
    await turn()

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "write", full)
        for at in range(1, 5):
            journal.append(entry, delivered(entry, at), partial(told.append, at))
            await asyncio.sleep(0.02)
        assert told == [1, 2, 3, 4]
        assert journal.is_failing
        assert not journal.takes(1)
        assert caplog.text.count("No space left on device") == 1
    while journal.is_failing:
        await asyncio.sleep(0.01)
    journal.append(entry, delivered(entry, 5), nothing)
    await turn()
    journal.close()
    assert known(tmp_path) == {entry.number: [accepted(entry), *(delivered(entry, at) for at in range(1, 6))]}


def test_what_follows_a_gap_is_not_taken_for_the_rest(tmp_path: Path) -> None:
    entry = Entry(3)
    files = segments.JournalSegments(tmp_path)
    files.begin()
    records = [accepted(entry), delivered(entry, 1), delivered(entry, 3), delivered(entry, 1), Ended(3, 4, 1.0)]
    files.write([journal_module.encode(record) for record in records])
    files.close()
    assert known(tmp_path) == {3: records[:2]}


def test_a_copy_that_was_carried_counts_once(tmp_path: Path) -> None:
    entry = Entry(3)
    records = [accepted(entry), delivered(entry, 1)]
    for _ in range(2):
        files = segments.JournalSegments(tmp_path)
        files.begin()
        files.write([journal_module.encode(record) for record in records])
        files.close()
    assert known(tmp_path) == {3: records}


def test_a_file_that_another_version_wrote_stays_for_that_version(tmp_path: Path) -> None:
    (tmp_path / "00000002.log").write_bytes(b"CBJRNL9\nrecords")
    for _ in range(2):
        journal_of(tmp_path).close()
        assert (tmp_path / "00000002.log").read_bytes() == b"CBJRNL9\nrecords"
        assert len(list(tmp_path.glob("*.log"))) == 2


async def test_what_gives_way_without_room_to_say_so_is_said_with_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(tmp_path)
    first, second = journal.begin(), journal.begin()
    for entry in (first, second):
        journal.append(entry, accepted(entry), nothing)
    await turn()
    record = delivered(second, 1)
    most = journal.num_bytes + segments.FRAME_BYTES + len(journal_module.encode(record))
    monkeypatch.setattr(journal, "_make_room", lambda num_bytes: True)
    monkeypatch.setattr(journal, "_most_bytes", most)  # what the record takes, and no more
    monkeypatch.setattr(journal, "_hold_to_memory", lambda: first.is_kept and journal._forget_for_others(first))
    journal.append(second, record, nothing)
    await turn()
    assert (journal.num_bytes, first.is_kept) == (most, False)
    monkeypatch.setattr(journal, "_most_bytes", MOST_BYTES)
    journal.append(second, delivered(second, 2), nothing)
    await turn()
    journal.close()
    assert set(known(tmp_path)) == {second.number}


@pytest.mark.parametrize("seed", range(8))
async def test_the_folder_never_takes_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Streams of all lengths, batches of all sizes, and copies that take a while; counted are the files themselves."""
    draw = random.Random(seed)
    copy = segments.JournalSegments.copy

    def slow_copy(*given: Any, **more: Any) -> int:
        time.sleep(draw.choice([0, 0.001, 0.003]))
        return copy(*given, **more)

    monkeypatch.setattr(segments.JournalSegments, "copy", slow_copy)
    journal = journal_of(tmp_path)
    running: list[tuple[Entry, int]] = []
    told = asked = most = 0

    def tell() -> None:
        nonlocal told
        told += 1

    for _ in range(600):
        while len(running) < 4:
            entry = journal.begin()
            journal.append(entry, accepted(entry, b"x" * draw.choice([2, 200, 2000, 7000])), tell)
            running.append((entry, 1))
            asked += 1
        for _ in range(draw.choice([1, 3, 10])):
            at = draw.randrange(len(running))
            entry, length = running[at]
            journal.append(entry, delivered(entry, length, "y" * draw.choice([1, 50, 900])), tell)
            running[at] = entry, length + 1
            asked += 1
        if draw.random() < 0.2:
            entry, length = running.pop(draw.randrange(len(running)))
            journal.end(entry, Ended(entry.number, length, 1.0), tell)
            asked += 1
        await turn(1)
        most = max(most, bytes_in(tmp_path))
    while told < asked or journal._moving is not None:
        await asyncio.sleep(0.001)
    assert MOST_BYTES // 2 < most <= MOST_BYTES
    expected = {entry.number: [decode(record) for record in entry.records] for entry in journal.entries.values()}
    journal.close()
    assert known(tmp_path).items() >= expected.items(), "what had to give way may be there until its file goes"
