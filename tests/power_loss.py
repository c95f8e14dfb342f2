"""What a disk may have after a loss of power: every state that POSIX allows, of a folder that was written to.

Owns: noting what is done to a folder, and building those states.  Does not know: what writes, what must not be lost.
A state is that of a moment, in which each name of a folder is as at the folder's last sync or as it was, by itself, and
each file has what it had at its last sync, what it had then, or is torn in between.  Where these are too many, a seed
chooses.  Files of SQLite are trusted: they are always as they were.
"""

import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import pytest

TRUSTED = "index.sqlite3"
CALLS = ("fsync", "rename", "replace", "unlink", "mkdir", "write", "ftruncate", "open")
Names = dict[str, int]  # name -> inode


@dataclass(frozen=True)
class Moment:
    """Folders and files by their inodes, now and at their last sync.  promised: what must not be lost from here on."""

    event: str
    folders: dict[int, Names]
    files: dict[int, bytes]
    synced_folders: dict[int, Names]
    synced_files: dict[int, bytes]
    promised: dict[Any, Any]


class NotedDisk:
    """Notes what is done below a folder, from now on until ``close``.  promised: what was acknowledged."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.promised: dict[Any, Any] = {}
        self.moments: list[Moment] = []
        self._root = root
        self._lock = RLock()
        self._open: dict[int, int] = {}  # inode -> descriptor, so that no number is used twice
        self._synced_folders: dict[int, Names] = {}
        self._synced_files: dict[int, bytes] = {}
        self._real = {name: getattr(os, name) for name in CALLS}
        self._is_noting = False
        self._snapshot("begin")
        for name in CALLS:
            monkeypatch.setattr(os, name, self._noted(name))

    def _noted(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            with self._lock:
                if self._is_noting:
                    return self._real[name](*given, **more)
                result = self._real[name](*given, **more)
                self._snapshot(name, given[0] if name == "fsync" else None)
                return result

        return call

    def note(self) -> None:
        """Note how it is now."""
        with self._lock:
            self._snapshot("note")

    def _snapshot(self, event: str, synced: int | None = None) -> None:
        self._is_noting = True
        try:
            folders: dict[int, Names] = {}
            pending = [self._root]
            while pending:
                folder = pending.pop()
                names = folders[os.stat(folder).st_ino] = {}
                for entry in os.scandir(folder):
                    names[entry.name] = entry.inode()
                    if entry.is_dir():
                        pending.append(Path(entry.path))
                    if entry.inode() not in self._open:
                        self._open[entry.inode()] = self._real["open"](entry.path, os.O_RDONLY)
            files = {
                inode: os.pread(file, 1 << 22, 0)
                for inode, file in self._open.items()
                if stat.S_ISREG(os.fstat(file).st_mode)
            }
            if synced is not None and (inode := os.fstat(synced).st_ino) in folders:
                self._synced_folders[inode] = folders[inode]
            elif synced is not None and inode in files:
                self._synced_files[inode] = files[inode]
            last = (dict(self._synced_folders), dict(self._synced_files), dict(self.promised))
            self.moments.append(Moment(event, folders, files, *last))
        finally:
            self._is_noting = False

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            os.close(file)

    def states(self, target: Path, seed: int, some: int = 6) -> Iterator[tuple[Moment, Path]]:
        """Build states in folders below ``target``, of each moment the extremes and ``some`` that a seed chooses."""
        rng, number = random.Random(seed), 0
        root = os.stat(self._root).st_ino
        for moment in self.moments:
            extremes = ((names, content) for names in ("old", "new") for content in ("old", "new", "torn"))
            for names, content in [*extremes, *[("any", "any")] * some]:
                number += 1
                _build(moment, root, target / str(number), names, content, rng)
                yield moment, target / str(number)


def _build(moment: Moment, inode: int, path: Path, names: str, content: str, rng: random.Random) -> None:
    path.mkdir(parents=True)
    old, new = moment.synced_folders.get(inode, {}), moment.folders.get(inode, {})
    for name in sorted({*old, *new}):
        is_old = names == "old" or (names == "any" and rng.random() < 0.5)
        chosen = new.get(name) if name.startswith(TRUSTED) or not is_old else old.get(name)
        if chosen is None:
            continue
        if chosen in moment.files:
            how = rng.choice(["old", "new", "torn"]) if content == "any" else content
            is_trusted = name.startswith(TRUSTED)
            (path / name).write_bytes(_content(moment, chosen, "new" if is_trusted else how, rng))
        else:
            _build(moment, chosen, path / name, names, content, rng)


def _content(moment: Moment, inode: int, how: str, rng: random.Random) -> bytes:
    old, new = moment.synced_files.get(inode, b""), moment.files[inode]
    if how == "new" or old == new:
        return new
    if how == "old":
        return old
    kept = rng.randrange(len(old), len(new)) if new.startswith(old) else rng.randrange(len(new) + 1)
    return new[:kept] + bytes(len(new) - kept) * rng.randrange(2)
