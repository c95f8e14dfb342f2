"""A device that stores token ids where K/V would lie, and whose next token is a hash of what it reads back.

One stale, aliased or misplaced page changes what is read, and so every token after it.
"""

import zlib
from collections import deque
from collections.abc import Callable
from itertools import takewhile

import msgspec
import numpy as np

from engine.execution.batch import lay_out
from engine.features.host_tier.messages import transfers_of
from engine.features.kv_store.messages import FetchPages, moves_of
from engine.features.speculation.messages import DRAFTED, NAME, drafted_part, proposals_of
from engine.kv.node import chained
from engine.messages import Step, StepDone

VOCAB = 1000
POISON = -7


def next_token(tokens: np.ndarray) -> int:
    """The oracle: a pure function of everything before."""
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int32).tobytes()) % VOCAB


def expected_output(
    prompt: np.ndarray, count: int, stop_ids: frozenset[int] = frozenset(), weights: int = 0
) -> list[int]:
    """Return the tokens of an undisturbed run of length ``count``."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < count:
        token = next_token(np.array(tokens) + VOCAB * weights)
        tokens.append(token)
        output.append(token)
        if token in stop_ids:
            break
    return output


class FakeDevice:
    """Runs steps in order; results wait in ``done`` until the test delivers them."""

    def __init__(
        self, *, max_running: int, max_len: int, page_size: int, num_pages: int, num_host_pages: int = 0
    ) -> None:
        self._page_size = page_size
        self._slots = np.full(num_pages * page_size, POISON, dtype=np.int32)
        self._host_pages = np.full((num_host_pages, page_size), POISON, dtype=np.int32)
        self._tokens = np.full((max_running, max_len + 1), POISON, dtype=np.int32)
        self._pages = np.full((max_running, -(-max_len // page_size)), -1, dtype=np.int32)
        self._computed = np.zeros(max_running, dtype=np.int32)
        self._lengths = np.zeros(max_running, dtype=np.int32)  # what a device knows of them that counts
        self.counts = False
        self.stored: dict[bytes, np.ndarray] = {}
        self._fetched: dict[int, list[np.ndarray]] = {}
        # What a draft model says behind some tokens, so many at a time; none if it is not ready.
        self.draft: Callable[[list[int], int], list[int]] | None = None
        self.done: deque[StepDone] = deque()
        self.weights = 0  # that compute what is stored from now on
        self.num_steps = 0
        self.num_moved_to_host = 0
        self.num_moved_back = 0

    def run(self, step: Step) -> None:
        pages = self._slots.reshape(-1, self._page_size)  # a view
        moves = moves_of(step)
        for number, page in enumerate(np.frombuffer(moves.save_pages, dtype=np.int32)):
            assert (pages[page] != POISON).all(), f"page {page} has no content and is saved"
            self.stored[moves.save_hashes[32 * number : 32 * number + 32]] = pages[page].copy()
        self._move_pages(step)
        for landing in moves.landings:
            fetched = self._fetched.pop(landing.fetch_id)[landing.first :]
            for number, page in enumerate(np.frombuffer(landing.pages, dtype=np.int32)):
                pages[page] = fetched[number]
        for admission in step.admissions:
            tokens = np.frombuffer(admission.token_ids, dtype=np.int32)
            pages = np.frombuffer(admission.pages, dtype=np.int32)
            self._tokens[admission.row] = POISON
            self._tokens[admission.row, : len(tokens)] = tokens
            self._pages[admission.row] = -1
            self._pages[admission.row, : len(pages)] = pages
            self._computed[admission.row] = admission.num_computed_tokens
        rows, indexes, pages = (
            np.frombuffer(column, dtype=np.int32) for column in (step.table_rows, step.table_indexes, step.table_pages)
        )
        self._pages[rows, indexes] = pages
        counted = np.frombuffer(proposals_of(step).counted, dtype=np.int32)
        step, too_many = self._counted(step, counted)
        rows, positions, tokens = proposals_of(step).columns()
        self._tokens[rows, positions] = tokens
        drafted = self._drafted(rows, positions) if DRAFTED in tokens else {}
        parts = {NAME: drafted_part(drafted, 1000 * self.counts)} if DRAFTED in tokens else {}
        batch = lay_out(step, self._computed)
        self._lengths[batch.rows_B] = batch.lengths_B
        self._computed[counted] += too_many
        said = {row: np.frombuffer(one, dtype=np.int32) for row, one in drafted.items()}
        slots = self._slot(batch.rows_T, batch.positions_T)
        assert len(np.unique(slots)) == len(slots), "two tokens of a step share a slot"
        self._slots[slots] = self._tokens[batch.rows_T, batch.positions_T] + VOCAB * self.weights
        sampled = []
        for row, position in zip(batch.sample_rows_N, batch.sample_positions_N, strict=True):
            context = self._slots[self._slot(np.full(position, row), np.arange(position))]
            token = next_token(context)
            self._tokens[row, position] = token
            sampled.append(token)
        for row in np.unique(rows).tolist() if self.counts else ():
            at = positions[rows == row]
            right = self._tokens[row, at] == said.get(row, np.full(len(at), POISON))
            self._lengths[row] = at[0] + int(right.cumprod().sum())
        self.num_steps += 1
        self.done.append(
            StepDone(rank=0, step_id=step.step_id, token_ids=np.array(sampled, dtype=np.int32).tobytes(), parts=parts)
        )

    def forget(self) -> None:
        """Lose the content of all pages."""
        self._slots[:] = POISON

    def _counted(self, step: Step, counted: np.ndarray) -> tuple[Step, np.ndarray]:
        """A step with the positions that rows really have, and how many more the planner has stated of each."""
        if not len(counted):
            return step, np.zeros(0, dtype=np.int32)
        rows, starts = (np.frombuffer(one, dtype=np.int32) for one in (step.prefill_rows, step.prefill_starts))
        stated = self._computed.copy()
        stated[rows] = starts
        more = stated - self._lengths
        assert (more[counted] >= 0).all(), "a row is planned for less than it may be"
        self._computed[counted] = self._lengths[counted]
        proposals = proposals_of(step)
        named, positions, _ = proposals.columns()
        moved = msgspec.structs.replace(proposals, positions=(positions - more[named]).astype(np.int32).tobytes())
        starts = (starts - np.where(np.isin(rows, counted), more[rows], 0)).astype(np.int32)
        step = msgspec.structs.replace(step, prefill_starts=starts.tobytes(), parts=step.parts | moved.part())
        return step, more[counted]

    def _drafted(self, rows: np.ndarray, positions: np.ndarray) -> dict[int, bytes]:
        assert self.draft is not None
        by_row = {}
        for row in np.unique(rows).tolist():
            at = positions[rows == row]
            drafted = self.draft(self._tokens[row, : at[0]].tolist(), len(at))
            self._tokens[row, at] = drafted or 0
            if drafted:
                by_row[row] = np.array(drafted, dtype=np.int32).tobytes()
        return by_row

    def fetch(self, message: FetchPages) -> int:
        """Return how many of the pages are stored, from the first on."""
        hashes = chained(message.parent, message.tokens, 4 * self._page_size)
        found = list(takewhile(lambda page: page is not None, map(self.stored.get, hashes)))
        self._fetched[message.fetch_id] = [page for page in found if page is not None]
        return len(found)

    def _move_pages(self, step: Step) -> None:
        device_pages = self._slots.reshape(-1, self._page_size)  # a view
        moves = transfers_of(step)
        columns = (moves.to_host, moves.device_pages, moves.host_pages)
        for to_host, on_device, on_host in zip(*(np.frombuffer(one, dtype=np.int32) for one in columns), strict=True):
            source = device_pages[on_device] if to_host else self._host_pages[on_host]
            assert (source != POISON).all(), f"a page without content is moved: {on_device} {to_host} {on_host}"
            if to_host:
                self._host_pages[on_host] = source
                self.num_moved_to_host += 1
            else:
                device_pages[on_device] = source
                self.num_moved_back += 1

    def _slot(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        pages = self._pages[rows, positions // self._page_size]
        assert (pages >= 0).all(), "a position has no page"
        return pages * self._page_size + positions % self._page_size
