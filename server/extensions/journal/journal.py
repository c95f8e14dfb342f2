"""The journal of requests: what must outlast this process, written once for each turn of the event loop.

Owns: which records are in which files, when they are written, how much there is, what happens where the disk is full.
Does not know: what a request is beyond its records; clients.

A record is on its way to the disk before any reader gets it: what a turn has brought is one write, and ``then`` of
each record is called after it.  What was written outlasts the process, however it ends; ``fsync`` decides what a loss
of power may take.  The records of every request that can be asked for are in memory as well, so nothing is read while
requests are served, and whatever is lost on disk can be written again.  So what requests take is counted as memory,
which is more than what they take on disk; neither is more than ``most_bytes``.

Whatever waits for the disk, or is long, is done by threads: syncing, and writing entries once more into a file of their
own.  That file lies in front of the one that is written to meanwhile, so it says what was before; what it stands for is
removed when it is synced.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from engine.types.errors import ConfigError
from server.extensions.journal.records import Accepted, Ended, Record, decode, encode
from server.extensions.journal.segments import FRAME_BYTES, MAGIC, JournalSegments

log = logging.getLogger(__name__)

Fsync = Literal["always", "interval", "never"]
FSYNC_EVERY_S = 1.0
MEND_EVERY_S = 5.0
NUM_SEGMENTS = 16  # files that share what the journal may take
LARGEST_BATCH = 2  # of these: what one write may add, and a request's body may have
ROOM = 1 + LARGEST_BATCH  # of these: a new file, which is full once it has one of them, and the batch that fills it
# What a request takes of memory, measured: objects around it, its body in each of its forms, and each record's object.
ENTRY_BYTES = 8 << 10
NUM_BODIES = 4
RECORD_BYTES = 48


class Entry:
    """One request's records.  num_bytes: what it takes of memory.  home: the first file that has any; 0 where none has.

    ended: its last record is there.  is_kept: whether the journal still has it."""

    __slots__ = ("ended", "home", "is_kept", "num_bytes", "number", "records")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[bytes] = []
        self.num_bytes = 0
        self.home = 0
        self.ended = False
        self.is_kept = True

    @property
    def disk_bytes(self) -> int:
        """The bytes of a copy in one frame."""
        return FRAME_BYTES + sum(map(len, self.records))

    def add(self, record: bytes) -> None:
        """Append a record."""
        self.num_bytes += RECORD_BYTES + len(record) if self.records else memory_of(len(record))
        self.records.append(record)


def memory_of(body_bytes: int) -> int:
    """Returns the bytes of memory that a request takes before it has any output."""
    return ENTRY_BYTES + NUM_BODIES * body_bytes


class Journal:
    """Open the journal, and read what was written before at once: ``entries`` has it, by number, in the order of their
    arrival.

    segments: opens the files of the folder.  forgotten: called with an entry that makes room for others, which may not
    have ended.  is_failing: nothing can be written just now."""

    def __init__(
        self,
        folder: Path,
        *,
        fsync: Fsync,
        most_bytes: int,
        segments: Callable[[Path], JournalSegments] = JournalSegments,
    ) -> None:
        """Raises ConfigError for a folder that cannot be written to, or that another process has."""
        self.entries: dict[int, Entry] = {}
        self.forgotten: Callable[[Entry], None] = lambda entry: None
        self.is_failing = False
        self._fsync = fsync
        self._most_bytes = most_bytes
        self._segment_bytes = most_bytes // NUM_SEGMENTS
        self._open_bytes = 0  # of those that have not ended
        self._kept_bytes = 0  # of all
        self._ended: dict[int, Entry] = {}  # in the order of their ends
        self._last_number = 0
        self._waiting: list[tuple[Entry, bytes, Callable[[], object]]] = []
        self._given_way: list[bytes] = []  # records that say so, which the next write has
        self._is_due = False
        self._is_closed = False
        self._is_writable = True  # also while what was not is written once more, and the journal still fails
        self._threads = ThreadPoolExecutor(2, "journal")
        self._syncing: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._moving_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._homes: dict[int, dict[int, Entry]] = {}
        self._segments = segments(folder)
        try:
            self._recover()
            self._segments.begin()
            self._sync_now()
            self._remove_unneeded()
        except OSError as error:
            self._segments.close()
            raise ConfigError(f"storage.folder: {folder}: {error.strerror}; the journal cannot be written") from None
        except ConfigError:
            self._segments.close()
            raise

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes on disk."""
        return self._segments.num_bytes

    def takes(self, num_bytes: int) -> bool:
        """Whether a request with so large a body can be written down."""
        return (
            not self.is_failing
            and num_bytes <= LARGEST_BATCH * self._segment_bytes
            and self._open_bytes + memory_of(num_bytes) <= self._most_bytes // 2
        )

    def begin(self) -> Entry:
        """Returns the entry of a new request, without a record."""
        self._last_number += 1
        entry = self.entries[self._last_number] = Entry(self._last_number)
        return entry

    def append(self, entry: Entry, record: Record, then: Callable[[], object]) -> None:
        """Write a record with all others of this turn of the event loop, and call ``then``."""
        self._waiting.append((entry, encode(record), then))
        self._commit_soon()

    def end(self, entry: Entry, record: Ended, then: Callable[[], object]) -> None:
        """Write an entry's last record; the entry is kept until ``forget``."""
        self.append(entry, record, then)
        if entry.is_kept and not entry.ended:
            self._open_bytes -= entry.num_bytes
            self._ended[entry.number] = entry
        entry.ended = True

    def forget(self, entry: Entry) -> None:
        """Keep an ended entry no longer."""
        self._drop(entry)
        try:
            if not self.entries and not self.is_failing:
                self._segments.begin(is_needed=False)  # what clients have said does not lie about
            self._remove_unneeded()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        self._is_closed = self._is_due = True  # whatever comes now is dropped
        waiting, self._waiting = self._waiting, []
        self._write(waiting)
        if self._timer is not None:
            self._timer.cancel()
        self._threads.shutdown()
        if self._is_writable:
            self._sync_now()
        self._segments.close()

    # ---- writing ----------------------------------------------------------------------------

    def _commit(self) -> None:
        self._is_due = self._is_closed
        if self._is_closed or (self._fsync == "always" and self._syncing is not None):
            return  # goes on when that is done
        num_bytes, count = FRAME_BYTES, 0
        for _, record, _ in self._waiting:
            if count and num_bytes + len(record) > LARGEST_BATCH * self._segment_bytes:
                break
            num_bytes += len(record)
            count += 1
        if not self._make_room(num_bytes):
            return  # goes on when files have moved
        waiting, self._waiting = self._waiting[:count], self._waiting[count:]
        self._write(waiting)
        if self._fsync == "always" and self._is_writable:
            self._syncing = asyncio.create_task(self._sync(waiting), name="journal-fsync")
            return
        if self._fsync == "interval" and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FSYNC_EVERY_S, self._sync_later)
        for _, _, then in waiting:
            then()
        self._commit_soon()

    def _commit_soon(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._commit)

    def _write(self, waiting: list[tuple[Entry, bytes, Callable[[], object]]]) -> None:
        written: list[bytes] = []
        for entry, record, _ in waiting:
            before = entry.num_bytes
            entry.add(record)
            if entry.is_kept:
                written.append(record)
                self._kept_bytes += entry.num_bytes - before
                self._open_bytes += 0 if entry.ended else entry.num_bytes - before
        num_counted = len(self._given_way)  # in the room that was made
        self._hold_to_memory()
        if not self._is_writable or not (written or self._given_way):
            return
        moving = self._moving_bytes if self._moving is not None else 0
        if not self._fits(moving + FRAME_BYTES + sum(map(len, written + self._given_way))):
            self._given_way, later = self._given_way[:num_counted], self._given_way[num_counted:]
        else:
            later = []
        try:
            self._segments.write(written + self._given_way)
        except OSError as error:
            self._given_way += later
            self._fail(error)
            return
        self._given_way = later  # with the next batch
        current = self._segments.current
        for entry, _, _ in waiting:
            if not entry.home and entry.is_kept:
                self._settle(entry, current)

    def _sync_now(self) -> None:
        if self._fsync != "never":
            self._segments.unsynced()()

    def _sync_later(self) -> None:
        self._timer = None
        if self._syncing is not None:
            self._timer = asyncio.get_running_loop().call_later(FSYNC_EVERY_S, self._sync_later)
        elif self._is_writable:
            self._syncing = asyncio.create_task(self._sync([]), name="journal-fsync")

    async def _sync(self, told: list[tuple[Entry, bytes, Callable[[], object]]]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._segments.unsynced())
        except OSError as error:
            self._fail(error)
        self._syncing = None
        for _, _, then in told:
            then()
        self._commit_soon()

    def _fail(self, error: OSError) -> None:
        if not self.is_failing:
            log.error(
                "journal: %s; streams go on without it, and new ones cannot be rejoined, until it can be written again",
                error.strerror,
            )
        self.is_failing = True
        self._is_writable = False
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(MEND_EVERY_S, self._mend)

    def _mend(self) -> None:
        """Write everything that is known into a new file: what was lost meanwhile is known as well."""
        self._timer = None
        if self._moving is not None:
            self._timer = asyncio.get_running_loop().call_later(MEND_EVERY_S, self._mend)
            return
        try:
            self._move(self.entries.values())
        except OSError as error:
            self._fail(error)
            return
        self._is_writable = True

    # ---- room -------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        """Returns whether a batch may be written: to the current file, or to a new one if that is full."""
        if self._is_writable and self._moving is None:
            is_full = self._segments.sizes[self._segments.current] >= self._segment_bytes
            try:
                if is_full or not self._fits(num_bytes):
                    self._rotate(is_full)
            except OSError as error:
                self._fail(error)
        given_way = sum(map(len, self._given_way))  # the batch has these too, also those of this rotation
        return self._moving is None or self._fits(self._moving_bytes + num_bytes + given_way)

    def _rotate(self, is_full: bool) -> None:
        """Begin a new file if the current one is full.  Raises OSError.

        Where it and a copy of all that runs have no room, what has ended in the oldest files is forgotten, and what
        runs there moves."""
        self._remove_unneeded()
        needed = ROOM * self._segment_bytes + self._open_bytes
        running: list[Entry] = []
        for number in sorted(self._segments.sizes)[:-1]:
            if self._fits(needed):
                break
            needed -= self._segments.sizes[number]
            for entry in list(self._homes.get(number, {}).values()):
                if entry.ended:
                    self._forget_for_others(entry)
                else:
                    running.append(entry)
                    needed += entry.disk_bytes
        if running:
            self._move(running)
            return
        self._remove_unneeded()
        if is_full:
            self._segments.begin()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self._most_bytes

    def _move(self, entries: Iterable[Entry]) -> None:
        """Begin a new file, and write entries as a whole into one in front of it.  Raises OSError.

        What does not fit beside the files that are there gives way: what has ended, then the longest."""
        number = self._segments.reserve()
        self._segments.begin()
        moved = [entry for entry in entries if entry.records]
        self._moving_bytes = len(MAGIC) + sum(entry.disk_bytes for entry in moved)
        for entry in sorted(moved, key=lambda one: (not one.ended, -one.disk_bytes)):
            if self._fits(self._moving_bytes):
                break
            self._moving_bytes -= entry.disk_bytes
            log.warning("journal: the %d KB of a stream have no room", entry.disk_bytes >> 10)
            self._forget_for_others(entry)
        copies = [(entry, tuple(entry.records)) for entry in moved if entry.is_kept]
        self._moving = asyncio.create_task(self._moved(number, copies), name="journal-move")

    async def _moved(self, number: int, copies: list[tuple[Entry, tuple[bytes, ...]]]) -> None:
        def copy() -> int:
            records = (records for _, records in copies)
            return self._segments.copy(number, records, is_synced=self._fsync != "never")

        is_mending = self.is_failing
        try:
            size = await asyncio.get_running_loop().run_in_executor(self._threads, copy) if copies else 0
            self._moving = None
            self._has_moved(number, size, [entry for entry, _ in copies if entry.is_kept])
            if is_mending and self._is_writable:
                self.is_failing = False
                log.warning("journal: it can be written again")
        except OSError as error:
            self._moving = None
            self._fail(error)
        self._commit_soon()

    def _has_moved(self, number: int, size: int, entries: Iterable[Entry]) -> None:
        if self._is_closed:
            return
        if size:
            self._segments.sizes[number] = size
        for entry in entries:
            self._settle(entry, number)
        self._remove_unneeded()

    def _hold_to_memory(self) -> None:
        """Forget what has ended, the first first, and what runs, the longest first, beyond what all may take."""
        while self._kept_bytes > self._most_bytes and self._ended:
            self._forget_for_others(next(iter(self._ended.values())))
        if self._open_bytes <= self._most_bytes // 2:
            return
        running = sorted((one for one in self.entries.values() if not one.ended), key=lambda one: one.num_bytes)
        while running and self._open_bytes > self._most_bytes // 2:
            entry = running.pop()
            log.warning("journal: the %d MB of a running stream have no room", entry.num_bytes >> 20)
            self._forget_for_others(entry)

    def _forget_for_others(self, entry: Entry) -> None:
        # Its records may stay for a while, and another server must not take it for one that runs.
        if entry.records and not isinstance(decode(entry.records[-1]), Ended):
            self._given_way.append(encode(Ended(entry.number, len(entry.records), time.time(), is_forgotten=True)))
        self._drop(entry)
        self.forgotten(entry)

    def _settle(self, entry: Entry, number: int) -> None:
        if entry.home in self._homes:
            del self._homes[entry.home][entry.number]
        entry.home = number
        self._homes.setdefault(number, {})[entry.number] = entry

    def _drop(self, entry: Entry) -> None:
        if not entry.is_kept:
            return
        entry.is_kept = False
        if entry.home in self._homes:
            del self._homes[entry.home][entry.number]
        del self.entries[entry.number]
        self._ended.pop(entry.number, None)
        self._kept_bytes -= entry.num_bytes
        if not entry.ended:
            self._open_bytes -= entry.num_bytes

    def _remove_unneeded(self) -> None:
        """Take away the files in front of the first one that has a record of an entry."""
        for number in sorted(self._segments.sizes)[:-1]:
            if self._homes.get(number):
                return
            self._segments.remove(number)
            self._homes.pop(number, None)

    # ---- reading ----------------------------------------------------------------------------

    def _recover(self) -> None:
        for number in sorted(self._segments.sizes):
            for records in self._segments.read(number):
                for raw in records:
                    try:
                        self._take(raw, decode(raw), number)
                    except msgspec.MsgspecError as error:
                        log.warning("journal: a record of file %d says nothing that is known here: %s", number, error)
        self._kept_bytes = sum(entry.num_bytes for entry in self.entries.values())
        self._open_bytes = self._kept_bytes - sum(entry.num_bytes for entry in self._ended.values())
        self._hold_to_memory()

    def _take(self, raw: bytes, record: Record, segment: int) -> None:
        self._last_number = max(self._last_number, record.number)
        if isinstance(record, Accepted):
            # A copy of what is known already, if it was carried here: this one is whole.
            entry = self.entries.setdefault(record.number, Entry(record.number))
            entry.records, entry.num_bytes, entry.ended = [], 0, False
            entry.add(raw)
            self._ended.pop(entry.number, None)
            self._settle(entry, segment)
            return
        known = self.entries.get(record.number)
        if known is not None and isinstance(record, Ended) and record.is_forgotten:
            self._drop(known)
            return
        if known is None or record.at != len(known.records):
            return  # what was in front of it is lost; the engine makes it again
        known.add(raw)
        if isinstance(record, Ended):
            known.ended = True
            self._ended[known.number] = known
