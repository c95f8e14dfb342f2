"""Whatever the project writes to a disk removes its own files alone: files of others beside them outlive it all."""

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.checkpoints import gguf
from engine.features.recording import recorder
from engine.features.traffic import recorder as traffic
from engine.features.traffic.trace import TraceHead
from engine.host.cache_folder import replace_file
from engine.kernels import library
from engine.plugins.kv_store import files
from engine.scheduling.rows import PlannerLimits
from engine.settings.sections import StorageSection
from engine.workers import socket_directory
from server.extensions.journal import segments
from server.extensions.storage import store
from server.extensions.storage.files import Files
from tests.extensions.journal.test_journal import accepted, journal_of
from tests.features.recording.driver import Driver

NAMES = (
    *(".ssh/id_ed25519", "thesis.txt", "notes.log", "7.log", "0007.log", "my-asked-1.cbr", "x-died-notes.cbr"),
    *("tested_model-notes.jsonl", "tested_model-2026.jsonl", "mine.so", "library-1.so", "file-notes", "notes.part"),
    *(
        "ab/ab-notes",
        f"ab/{'cd' * 32}",
        "incoming/photo-2024-01-02",
        "ranks.txt",
        "callboard-mine/lock",
        "callboard-mine/notes",
    ),
)


LIMITS = PlannerLimits(4, 64, 32, 16, 100, 512, (2,))
ANY = re.compile(".*", re.DOTALL)


async def page_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / files.MARK).touch()
    for _ in range(2):
        pages = files.FileStore(folder, 2000)
        for number in range(20):
            pages.put(bytes([number]) * 32, memoryview(bytes(500)))
        pages.close()


async def requests_journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        written = journal_of(folder, fsync="always")
        for number in range(200):
            entry, told = written.begin(), asyncio.Event()
            written.append(entry, accepted(entry, bytes(1000)), told.set)
            await told.wait()
            if number % 2:
                written.forget(entry)
        written.close()


async def storage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        opened = store.Store(StorageSection(folder=str(folder.parents[1]), retention_hours=1))
        await Files(opened).sweep()
        opened.content(f"file-{'a' * 32}.part").touch()
        opened.close()


async def recordings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_FILES", 1)
    driver = Driver(folder)
    driver.run(1)
    for why in ("asked", "died", "asked", "died"):
        assert driver.recorder.write(why).result(60) == ""


async def traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = traffic._Files(folder, "tested_model", 0)
    for _ in range(3):
        written.start(TraceHead(1, "", "tested_model", 0.0, 16, LIMITS, {}))
        written.end_of_batch()
    written.close()


async def sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_directory, "YOUNG_S", -1.0)
    made = socket_directory.SocketDirectory(folder.parent)
    (made.path / "executor0.sock").touch()
    made.remove()


async def kernel_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = folder / f"{'a' * 32}-{'b' * 32}.so"
    damaged.write_bytes(b"damaged")
    assert library._kept(folder, "a" * 32) is None
    assert not damaged.exists()
    replace_file(folder / "kept", b"kept")


async def unfolded_gguf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: Path, target: Path) -> Path:
        raise OSError("another process was faster")

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    path = folder.parents[1] / "model.gguf"
    path.write_bytes((Path(__file__).parent / "fuzz/corpus/gguf_files/llama").read_bytes())
    assert gguf.unfold(path).is_dir()
    path.touch()  # another file now
    monkeypatch.setattr(Path, "rename", taken)
    gguf.unfold(path)


def by_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal takes every file with a number for its own, whatever it says."""

    def path(self: segments.JournalSegments, number: int) -> Path:
        named = (one for one in self._folder.glob("*.log") if one.stem.isdecimal() and int(one.stem) == number)
        return next(named, self._folder / f"{number:08d}.log")

    monkeypatch.setattr(segments, "NAMED", re.compile(r"[0-9]+\.log"))
    monkeypatch.setattr(segments, "MAGIC", b"")
    monkeypatch.setattr(segments.JournalSegments, "_path", path)


# What writes, the folder that it has below its root, and a mutant that does not look at names.
WRITERS: dict[
    str, tuple[Callable[[Path, pytest.MonkeyPatch], Awaitable[None]], str, Callable[[pytest.MonkeyPatch], None]]
] = {
    "page store": (page_store, "pages", lambda patch: patch.setattr(files, "RECORD", re.compile(".+/.+"))),
    "journal": (requests_journal, "journal", by_number_alone),
    "storage": (storage, "store/contents", lambda patch: patch.setattr(store, "CONTENT", ANY)),
    "recordings": (recordings, "recordings", lambda patch: patch.setattr(recorder, "NAMED", re.compile("(.*)"))),
    "traces": (traces, "traces", lambda patch: patch.setattr(traffic, "NAMED", ".*")),
    "sockets": (sockets, "callboard-another", lambda patch: patch.setattr(socket_directory, "OWN", ANY)),
    "kernel cache": (
        kernel_cache,
        "kernels",
        lambda patch: patch.setattr(Path, "glob", lambda folder, pattern: list(folder.iterdir())),
    ),
    "unfolded GGUF": (
        unfolded_gguf,
        "callboard/gguf",
        lambda patch: patch.setattr(gguf, "shutil", SimpleNamespace(rmtree=lambda path: shutil.rmtree(path.parent))),
    ),
}


def foreign_tree(folder: Path, names: Sequence[str]) -> Callable[[], list[str]]:
    """Make files that the project did not write; returns what says which of them are gone, or others now."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (0, 0))
    return lambda: [name for name in names if not (one := folder / name).is_file() or one.read_text() != name]


async def lost(name: str, root: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = NAMES) -> list[str]:
    """Run a writer with a foreign tree inside of its folder, and one beside it; returns what is lost of both."""
    run, at, _ = WRITERS[name]
    root.chmod(0o700)
    (root / at).mkdir(parents=True)
    trees = [foreign_tree(root / at, names), foreign_tree((root / at).parent, names)]
    await run(root / at, monkeypatch)
    return [one for tree in trees for one in tree()]


@pytest.mark.parametrize("name", WRITERS)
async def test_a_foreign_tree_outlives_what_writes_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await lost(name, tmp_path, monkeypatch) == []


@pytest.mark.parametrize("name", WRITERS)
async def test_a_writer_that_does_not_look_at_names_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name][2](monkeypatch)
    deep = name in ("page store", "sockets", "unfolded GGUF")  # others would not remove a folder
    assert await lost(name, tmp_path, monkeypatch, [one for one in NAMES if deep or "/" not in one])
