"""Whatever a loss of power leaves, nothing that was acknowledged is lost, and everything starts again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.host import appended_file, cache_folder, disk
from engine.host.cache_folder import replace_file
from engine.kernels import library
from engine.plugins.kv_store import files
from engine.settings.sections import StorageSection
from server.extensions.journal import journal as journal_module
from server.extensions.journal import segments
from server.extensions.storage import store
from server.extensions.storage.files import Files
from tests.extensions.journal.test_journal import accepted, delivered, journal_of
from tests.power_loss import NotedDisk
from tests.server.test_store import file_of

pytestmark = pytest.mark.slow  # each state starts a component

RECORD = 400
MOST_BYTES = 32 << 10


async def write_journal(root: Path, noted: NotedDisk) -> None:
    journal = journal_of(root / "journal", fsync="always", most_bytes=MOST_BYTES)
    journal.forgotten = lambda entry: noted.promised.pop(entry.number, None)
    running = journal.begin()
    for at in range(30):
        told = asyncio.Event()
        journal.append(running, delivered(running, at, "x" * RECORD) if at else accepted(running), told.set)
        brief = journal.begin()
        journal.append(brief, accepted(brief, b"x" * RECORD), told.set)
        await told.wait()
        noted.promised |= {running.number: at + 1, brief.number: 1}
        noted.note()
        if at == 12:
            journal._fail(OSError(5, "Input/output error"))
            while journal.is_failing:
                await asyncio.sleep(0.001)
            noted.note()
        noted.promised.pop(brief.number, None)
        journal.end(brief, journal_module.Ended(brief.number, 1, 1.0), lambda: None)
    await asyncio.sleep(0.02)
    journal.close()


def read_journal(root: Path) -> dict[Any, Any]:
    journal = journal_of(root / "journal", fsync="always", most_bytes=MOST_BYTES)
    found = {number: len(entry.records) for number, entry in journal.entries.items()}
    journal.close()
    return found


async def write_journal_after_another(root: Path, noted: NotedDisk) -> None:
    """A first process has written and not synced; the second one tells clients what it has read."""
    first = journal_of(root / "journal", fsync="never", most_bytes=MOST_BYTES)
    entry, told = first.begin(), asyncio.Event()
    first.append(entry, accepted(entry), told.set)
    await told.wait()
    first.close()
    second = journal_of(root / "journal", fsync="always", most_bytes=MOST_BYTES)
    noted.promised |= {number: len(one.records) for number, one in second.entries.items()}
    for _ in range(4):
        told.clear()
        brief = second.begin()
        second.append(brief, accepted(brief), told.set)
        await told.wait()
        noted.promised[brief.number] = 1
        noted.note()
    second.close()


async def write_pages(root: Path, noted: NotedDisk) -> None:
    pages = files.FileStore(root / "pages", 1 << 20, sync=True)
    for number in range(4):
        pages.put(bytes([number]) * 32, memoryview(bytes([number]) * 100))
        noted.promised[number] = 1
        noted.note()


def read_pages(root: Path) -> dict[Any, Any]:
    pages, found = files.FileStore(root / "pages", 1 << 20, sync=True), {}
    for number in range(4):
        record = bytearray(100)
        if pages.get(bytes([number]) * 32, memoryview(record)) and record == bytes([number]) * 100:
            found[number] = 1
    return found


async def write_contents(root: Path, noted: NotedDisk) -> None:
    opened = store.Store(StorageSection(folder=str(root)))
    for number in range(3):
        name = f"file-{number:032x}"
        part = opened.content(name + store.PART)
        with part.open("xb") as file:  # as an upload and a batch do it
            file.write(b"xxx")
            store.Store.sync(file)
        await Files(opened).add("", file_of(name), part)
        noted.promised[name] = 1
        noted.note()
    opened.close()


def read_contents(root: Path) -> dict[Any, Any]:
    opened = store.Store(StorageSection(folder=str(root)))
    rows = opened._connection.execute("SELECT id, bytes FROM files").fetchall()
    found = {name: 1 for name, size in rows if opened.content(name).read_bytes() == b"x" * size}
    opened.close()
    return found


async def write_kernels(root: Path, noted: NotedDisk) -> None:
    for content in (b"one" * 100, b"another" * 100):
        name = f"{'a' * 32}-{library._digest(content)}.so"
        replace_file(root / "kernels" / name, content)
        noted.note()


def read_kernels(root: Path) -> dict[Any, Any]:
    for path in (root / "kernels").glob("*.so"):
        assert path.stem.endswith(library._digest(path.read_bytes())), f"{path} has its name before its content"
    library._kept(root / "kernels", "a" * 32)
    return {}


WRITERS: dict[str, tuple[Callable[[Path, NotedDisk], Awaitable[None]], Callable[[Path], dict[Any, Any]]]] = {
    "journal": (write_journal, read_journal),
    "journal of a second process": (write_journal_after_another, read_journal),
    "page store": (write_pages, read_pages),
    "storage": (write_contents, read_contents),
    "kernel cache": (write_kernels, read_kernels),
}


def unsynced_copy(self: segments.JournalSegments, number: int, entries: Any, *, is_synced: bool) -> int:
    return COPY(self, number, entries, is_synced=False)


def unsynced_file(path: Path, begun: Path, head: bytes, *, is_synced: bool) -> Any:
    return appended_file.whole_file(path, begun, head, is_synced=False)


COPY = segments.JournalSegments.copy
# Writer, and what is left out.  The first two are how the journal once was.
MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    "no sync of the journal's folder": ("journal", segments, "sync_folder", lambda path: None),
    "old files go before the new one is synced": ("journal", segments.JournalSegments, "copy", unsynced_copy),
    "no sync of what an earlier process wrote": (
        "journal of a second process",
        segments.JournalSegments,
        "_open_found",
        lambda self: [],
    ),
    "no sync of the folder above": ("journal", disk, "sync_folder", lambda path: None),
    "no sync of a page's folder": ("page store", appended_file, "sync_folder", lambda path: None),
    "no sync of the folder above the store": ("storage", disk, "sync_folder", lambda path: None),
    "no sync of a content": ("storage", store.Store, "sync", lambda file: None),
    "no sync of a kernel": ("kernel cache", cache_folder, "whole_file", unsynced_file),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENTRY_BYTES", 0), ("NUM_BODIES", 1), ("RECORD_BYTES", 0), ("MEND_EVERY_S", 0.005)):
        monkeypatch.setattr(journal_module, name, value)

    def load(path: str) -> None:
        digest = library._digest(Path(path).read_bytes())
        assert Path(path).stem.endswith(digest), "a damaged library is loaded"

    monkeypatch.setattr(library, "KernelLibrary", load)


async def losses(name: str, root: Path) -> tuple[int, list[str]]:
    """Returns the number of states, and what went wrong in them."""
    write, read = WRITERS[name]
    (root / "disk").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        noted = NotedDisk(root / "disk", patched)
        await write(root / "disk", noted)
    wrong, count = [], itertools.count()
    for moment, state in noted.states(root / "states", seed=1):
        next(count)
        try:
            found = read(state)
        except Exception as error:
            wrong.append(f"after {moment.event}: {error!r}")
            continue
        lost = {key: value for key, value in moment.promised.items() if found.get(key, 0) < value}
        wrong += [f"after {moment.event}: {lost} of {moment.promised} is lost"] if lost else []
    noted.close()
    return next(count), wrong


@pytest.mark.parametrize("name", WRITERS)
async def test_nothing_acknowledged_is_lost_and_everything_starts(name: str, tmp_path: Path) -> None:
    num_states, wrong = await losses(name, tmp_path)
    assert not wrong
    assert num_states > 50


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_sync_that_is_left_out_is_found(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place, attribute, replacement = MUTANTS[mutant]
    monkeypatch.setattr(place, attribute, replacement)
    assert (await losses(name, tmp_path))[1]
