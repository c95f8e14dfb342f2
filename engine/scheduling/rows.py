"""The row table: every running sequence's numbers as columns, so that a step costs numpy calls and not a loop.

Owns: the host's copy of what a row holds.  Does not know: the queue, budgets, the device.
Each count of a row's tokens has its writers, beside ``take``, which sets them all:
  num_known      values on the host                          the completion of a step
  num_planned    those, and those being sampled              Decodes and Prefills, as they plan
  num_computed   with K/V, also of steps in flight           Decodes and Prefills, as they plan
  num_confirmed  of a prefill: with K/V of completed steps   the completion of a step
num_computed <= num_planned, and num_known lags num_planned by the steps in flight.  Page tables are PageManager's and
Decodes'.  running: from a row's first step to its end; a row that has ended is kept until the last step that used it
has completed.  num_shared: pages that it found in the cache when it started.
"""

import numpy as np
import numpy.typing as npt

from engine.kv.pages import Pages
from engine.scheduling.sequence import Sequence

Rows = npt.NDArray[np.int32]
NO_TOKEN = -1


class RowTable:
    """``max_running`` rows of at most ``max_len`` tokens."""

    def __init__(self, max_running: int, max_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * max_running
        self.request_ids = np.zeros(max_running, dtype=np.int64)
        self.tokens = np.zeros((max_running, max_len), dtype=np.int32)
        self.running = np.zeros(max_running, dtype=np.bool_)
        self.num_prompt = np.zeros(max_running, dtype=np.int32)
        self.num_shared = np.zeros(max_running, dtype=np.int32)
        self.num_known = np.zeros(max_running, dtype=np.int32)
        self.num_planned = np.zeros(max_running, dtype=np.int32)
        self.num_computed = np.zeros(max_running, dtype=np.int32)
        self.num_confirmed = np.zeros(max_running, dtype=np.int32)
        self.max_total = np.zeros(max_running, dtype=np.int32)
        self.num_pages = np.zeros(max_running, dtype=np.int32)
        self.page_table = np.zeros((max_running, -(-max_len // page_size)), dtype=np.int32)
        self.last_step = np.zeros(max_running, dtype=np.int64)
        self.stop_ids = np.full((4, max_running), NO_TOKEN, dtype=np.int32)
        self._free = list(range(max_running - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no sequence holds."""
        return len(self._free)

    def take(self, sequence: Sequence, pages: Pages, num_shared: int) -> int:
        """Give a sequence a row and its first pages, ``num_shared`` of which hold K/V already; returns the row."""
        row = self._free.pop()
        count = len(sequence.tokens)
        self.sequences[row] = sequence
        self.request_ids[row] = sequence.request_id
        self.tokens[row, :count] = sequence.tokens
        self.running[row] = True
        self.num_prompt[row] = sequence.num_prompt
        self.num_shared[row] = num_shared
        self.num_known[row] = self.num_planned[row] = count
        self.num_computed[row] = self.num_confirmed[row] = num_shared * self.page_size
        self.max_total[row] = sequence.max_total
        self.num_pages[row] = len(pages)
        self.page_table[row, : len(pages)] = pages
        self.last_step[row] = -1
        self._set_stop_ids(row, sequence.stop_ids)
        sequence.row = row
        return row

    def release(self, row: int) -> Pages:
        """Take the row back; returns the pages it held."""
        pages = self.page_table[row, : self.num_pages[row]].copy()
        self.sequences[row] = None
        self.num_pages[row] = 0
        self._free.append(row)
        return pages

    def clear(self) -> None:
        """Every row is free."""
        self.sequences = [None] * len(self.sequences)
        self.running[:] = False
        self.num_pages[:] = 0
        self._free = list(range(len(self.sequences) - 1, -1, -1))

    def append_pages(self, rows: Rows, pages: Pages) -> Rows:
        """Append one page to each of ``rows``; returns the index it took in each row's page table."""
        indexes = self.num_pages[rows]
        self.page_table[rows, indexes] = pages
        self.num_pages[rows] = indexes + 1
        return indexes

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[0]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, missing), (0, 0)), constant_values=NO_TOKEN)
        self.stop_ids[:, row] = NO_TOKEN
        self.stop_ids[: len(stop_ids), row] = stop_ids
