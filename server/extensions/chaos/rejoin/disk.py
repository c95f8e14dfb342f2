"""A simulated disk below the journal: what it has after the process is killed, and after a loss of power.

Owns: which records are written, which are synced, which names of files are.  Does not know: what records say.
A frame is there whole or not at all, as checksums make sure on a real one.  A name that no sync of the folder has made
sure of may be missing after a loss of power, and a file that was removed may be back.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from server.extensions.journal.segments import FRAME_BYTES, MAGIC, JournalSegments

Dice = Callable[[], float]


@dataclass
class DiskFile:
    """A file.  frames: of records.  num_synced: of these.  is_named: its name is synced.  is_gone: it was removed."""

    frames: list[list[bytes]] = field(default_factory=list)
    num_synced: int = 0
    is_named: bool = False
    is_gone: bool = False

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        return len(MAGIC) + sum(FRAME_BYTES + sum(map(len, frame)) for frame in self.frames)


class SimDisk:
    """The files of one life of the process, by number.  is_full: nothing can be written."""

    def __init__(self, files: dict[int, DiskFile] | None = None) -> None:
        self.files: dict[int, DiskFile] = files or {}
        self.is_full = False

    def check_room(self) -> None:
        """Raise OSError if nothing can be written."""
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync_names(self) -> None:
        """Make sure of the names as they are now."""
        self.files = {number: file for number, file in self.files.items() if not file.is_gone}
        for file in self.files.values():
            file.is_named = True

    def after_kill(self) -> "SimDisk":
        """Return what the next process finds: all that was written."""
        return SimDisk(
            {number: replace(file, frames=list(file.frames)) for number, file in self.files.items() if not file.is_gone}
        )

    def after_power_loss(self, dice: Dice) -> "SimDisk":
        """Return what is found when power is back: what was synced, and what luck has left of the rest."""
        found: dict[int, DiskFile] = {}
        for number, file in self.files.items():
            if (file.is_gone or not file.is_named) and dice() < 0.5:
                continue
            kept = file.num_synced + int(dice() * (len(file.frames) - file.num_synced + 1))
            found[number] = DiskFile(file.frames[:kept], kept, is_named=True)
        return SimDisk(found)


class SimSegments(JournalSegments):
    """The journal's files on a simulated disk."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.sizes = {number: file.num_bytes for number, file in sorted(disk.files.items())}
        self._last = max(self.sizes, default=0)
        self._found = list(self.sizes)
        self._written: DiskFile | None = None  # the file that it writes to; none of an earlier process
        self._left_behind: list[DiskFile] = []
        self._is_new = False

    def read(self, number: int) -> Iterator[list[bytes]]:
        yield from self._disk.files[number].frames

    def begin(self, *, is_needed: bool = True) -> None:
        number = self.reserve()
        self._disk.check_room()
        self._left_behind += [] if self._written is None else [self._written]
        if not is_needed:
            self._left_behind.clear()
        file = self._written = self._disk.files[number] = DiskFile()
        self.sizes[number] = file.num_bytes
        self._is_new = True

    def copy(self, number: int, entries: Iterable[Sequence[bytes]], *, is_synced: bool) -> int:
        self._disk.check_room()
        file = self._disk.files[number] = DiskFile([list(records) for records in entries])
        if is_synced:
            file.num_synced = len(file.frames)
            self._disk.sync_names()
        return file.num_bytes

    def write(self, records: Sequence[bytes]) -> None:
        self._disk.check_room()
        self._disk.files[self.current].frames.append(list(records))
        self.sizes[self.current] += FRAME_BYTES + sum(map(len, records))

    def unsynced(self) -> Callable[[], None]:
        found = [self._disk.files[number] for number in self._open_found()]
        files = [(file, len(file.frames)) for file in (*found, *self._left_behind, self._disk.files[self.current])]
        self._left_behind.clear()
        is_new, self._is_new = self._is_new, False

        def sync() -> None:
            self._disk.check_room()
            for file, num_frames in files:
                file.num_synced = max(file.num_synced, num_frames)
            if is_new:
                self._disk.sync_names()

        return sync

    def _open_found(self) -> Iterator[int]:
        found, self._found = self._found, []
        return (number for number in found if number in self.sizes)

    def remove(self, number: int) -> None:
        assert number != self.current
        self._disk.files[number].is_gone = True
        del self.sizes[number]

    def close(self) -> None:
        """Keep nothing open."""
