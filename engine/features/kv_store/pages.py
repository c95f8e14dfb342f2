"""Pages on their way between one rank's KV pool and the store, next to the steps.

Owns: a thread that reads and one that writes, fetched pages that are not used yet, the limit on all of it.
Does not know: what a store is, whose pages these are.
The device thread only copies pages out of the pool and into it.  Whatever the store does, a fetch is answered in time;
pages that find the writer too far behind are not saved.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.features.kv_store.messages import FetchPages, PagesFetched, moves_of
from engine.features.kv_store.records import DIGEST_BYTES, PageRecords
from engine.kv.node import chained
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates
from engine.messages import Step

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0  # shorter than the time in which an executor's process must end
TOKEN_BYTES = 4


@dataclass(slots=True)
class _PageRead:
    """A fetch and the records read so far, each a digest and its page.  is_closed: no more records count.

    states: number of pages -> the record of the states behind them."""

    message: FetchPages
    answer: Callable[[PagesFetched], None]
    records: list[Tensor] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)
    is_answered: bool = False
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class StoredStates:
    """The states of recurrent layers in a store: a record of all layers for each page behind which they are kept."""

    records: PageRecords
    states: RecurrentStates


@dataclass(frozen=True, slots=True)
class _Save:
    """Pages or states to be written to ``place``.

    records: [n, record bytes], on the host; with ``event``, once that is reached."""

    place: PageRecords
    hashes: list[bytes]
    records: Tensor
    event: torch.cuda.Event | None


class StoredPages:
    """The pages of one rank on their way to a store and back.

    most_bytes: limit on pages that were read and not used yet, and a second one for pages that wait to be written.
    states: of a model with recurrent layers; None for another."""

    def __init__(
        self, records: PageRecords, pool: KVPool, rank: int, most_bytes: int, states: StoredStates | None = None
    ) -> None:
        self._states = states
        self._records = records
        self._pages = pool.by_page
        self._page_bytes = pool.page_size * TOKEN_BYTES
        self._rank = rank
        self._most_bytes = most_bytes
        self._on_cuda = pool.data.is_cuda
        self._changing = threading.Lock()
        self._fetches: dict[int, _PageRead] = {}
        self._num_read_bytes = self._num_write_bytes = 0
        self._num_failed = self._num_skipped = 0
        self._reading: _PageRead | None = None
        self._to_read: queue.SimpleQueue[_PageRead | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._is_closed = False
        self._reader = threading.Thread(target=self._read_all, name=f"kv_store.read{rank}", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name=f"kv_store.write{rank}", daemon=True)
        self._reader.start()
        self._writer.start()

    # ---- the device thread ------------------------------------------------------------------

    def save(self, step: Step) -> None:
        """Copy the pages that the step saves out of the pool, before anything else of the step changes them."""
        moves = moves_of(step)
        if moves.save_pages:
            self._write(self._records, moves.save_pages, moves.save_hashes, self._of_pages)
        if moves.save_slots:
            assert self._states is not None, "states are saved of a model without any"
            self._write(self._states.records, moves.save_slots, moves.state_hashes, self._of_slots)

    def _write(
        self, place: PageRecords, column: bytes, all_hashes: bytes, read: Callable[[npt.NDArray[np.int32]], Tensor]
    ) -> None:
        """Copy what ``read`` returns for the numbers of a column, a row each, on its way to the writer."""
        numbers = np.frombuffer(column, dtype=np.int32)
        num_bytes = len(numbers) * place.record_bytes
        if self._num_write_bytes + num_bytes > self._most_bytes:
            self._note_skipped(len(numbers))
            return
        with self._changing:
            self._num_write_bytes += num_bytes
        records = torch.empty((len(numbers), place.record_bytes), dtype=torch.uint8, pin_memory=self._on_cuda)
        found = read(numbers)
        records[:, DIGEST_BYTES:].copy_(found.reshape(len(numbers), -1).view(torch.uint8), non_blocking=self._on_cuda)
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
        size = len(all_hashes) // len(numbers)
        hashes = [all_hashes[at : at + size] for at in range(0, len(all_hashes), size)]
        self._to_write.put(_Save(place, hashes, records, event))

    def _of_pages(self, pages: npt.NDArray[np.int32]) -> Tensor:
        index = torch.from_numpy(pages.astype(np.int64))
        if self._on_cuda:
            index = index.pin_memory().to(self._pages.device, non_blocking=True)
        return self._pages.index_select(0, index)

    def _of_slots(self, slots: npt.NDArray[np.int32]) -> Tensor:
        assert self._states is not None
        slot = self._states.states.slot
        assert slot is not None, "states are saved that no slot has"
        return torch.stack([slot(one) for one in slots.tolist()])

    def land(self, step: Step) -> None:
        """Copy fetched pages into the pool, and forget the fetches."""
        if self._states is not None:
            self._states.states.arrived.clear()
        for landing in moves_of(step).landings:
            with self._changing:
                fetch = self._fetches.pop(landing.fetch_id, None)
                if fetch is None:
                    assert not landing.pages, f"fetch {landing.fetch_id} lands and was never made"
                    continue
                fetch.is_closed = True
                self._num_read_bytes -= sum(one.nbytes for one in (*fetch.records, *fetch.states.values()))
            pages = np.frombuffer(landing.pages, dtype=np.int32).tolist()
            records = fetch.records[landing.first : landing.first + len(pages)]
            for page, record in zip(pages, records, strict=True):
                into = self._pages[page]
                into.copy_(record[DIGEST_BYTES:].view(into.dtype).view(into.shape), non_blocking=self._on_cuda)
            if landing.state:
                assert self._states is not None, "states land in a model without any"
                states = self._states.states
                states.arrived[landing.fetch_id] = fetch.states[landing.state][DIGEST_BYTES:].view(states.data.dtype)

    # ---- any thread -------------------------------------------------------------------------

    def fetch(self, message: FetchPages, answer: Callable[[PagesFetched], None]) -> None:
        """Begin to read.  ``answer`` is called once, from any thread, at ``give_up`` at the latest."""
        fetch = _PageRead(message, answer)
        with self._changing:
            self._fetches[message.fetch_id] = fetch
        reading = self._reading
        if reading is not None and reading.is_answered:  # the reader is late: a new fetch would wait for nothing
            self._answer(fetch)
        else:
            self._to_read.put(fetch)

    def give_up(self, fetch_id: int) -> None:
        """Answer a fetch whose time is over with the pages that have been read."""
        fetch = self._fetches.get(fetch_id)
        if fetch is not None:
            self._answer(fetch)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the pages that wait to be written, as far as there is time for it, and end the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        self._to_read.put(None)
        self._to_write.put(None)
        self._writer.join(timeout_s)
        if self._writer.is_alive() and timeout_s:
            log.warning("rank %d: the store takes too long; %d bytes are not saved", self._rank, self._num_write_bytes)

    # ---- internals --------------------------------------------------------------------------

    def _answer(self, fetch: _PageRead) -> None:
        with self._changing:
            if fetch.is_answered:
                return
            fetch.is_answered = fetch.is_closed = True
            num_pages, states = len(fetch.records), tuple(fetch.states)
        fetch.answer(PagesFetched(rank=self._rank, fetch_id=fetch.message.fetch_id, num_pages=num_pages, states=states))

    def _read_all(self) -> None:
        while (fetch := self._to_read.get()) is not None:
            self._reading = fetch
            try:
                self._read(fetch)
            except Exception as error:  # whatever a store raises is a miss
                self._note_failure("read", error)
            self._reading = None
            self._answer(fetch)

    def _read(self, fetch: _PageRead) -> None:
        """Read page by page, as far as they follow each other without a gap, and the states behind them."""
        hashes = chained(fetch.message.parent, fetch.message.tokens, self._page_bytes)
        for number, page_hash in enumerate(hashes, start=1):
            if (record := self._load(self._records, page_hash, fetch)) is None:
                return
            state = None if self._states is None else self._load(self._states.records, page_hash, fetch)
            with self._changing:
                if fetch.is_closed:
                    return
                fetch.records.append(record)
                if state is not None:
                    fetch.states[number] = state
                self._num_read_bytes += record.nbytes + (0 if state is None else state.nbytes)

    def _load(self, place: PageRecords, page_hash: bytes, fetch: _PageRead) -> Tensor | None:
        """Return a record; None if there is none, or no room."""
        if fetch.is_closed or self._num_read_bytes + place.record_bytes > self._most_bytes:
            return None
        record = torch.empty(place.record_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        return record if place.load(page_hash, record.numpy().data) else None

    def _write_all(self) -> None:
        while (save := self._to_write.get()) is not None:
            try:
                if save.event is not None:
                    save.event.synchronize()
                for page_hash, record in zip(save.hashes, save.records.numpy(), strict=True):
                    save.place.save(page_hash, record.data)
            except Exception as error:  # pages that are not saved are computed again
                self._note_failure("write", error)
            with self._changing:
                self._num_write_bytes -= save.records.nbytes
        for place in [self._records, *([] if self._states is None else [self._states.records])]:
            try:
                place.store.close()
            except Exception as error:
                self._note_failure("close", error)

    def _note_failure(self, what: str, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:  # the first, second, fourth, ...: it may fail each time
            log.warning("rank %d: the store failed to %s (failure %d): %r", self._rank, what, self._num_failed, error)

    def _note_skipped(self, count: int) -> None:
        before, self._num_skipped = self._num_skipped, self._num_skipped + count
        if before.bit_length() != self._num_skipped.bit_length():
            log.warning("rank %d: the store is behind; %d pages were not saved so far", self._rank, self._num_skipped)
