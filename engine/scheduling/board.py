"""The departures board: the place of each request in the engine, and the content of each page of the pool.

Owns: the shape of both, and how they are drawn within a bound, whatever the number of requests and pages.
Does not know: text, clients, where a board is shown.
Planning prepares nothing for it: a board is drawn from the planner's own tables when one is requested.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import msgspec
import numpy as np

from engine.kv.outline import Outline
from engine.kv.pages import PageAllocator, Pages
from engine.scheduling.pages import PageManager
from engine.scheduling.requests import Requests
from engine.scheduling.rows import RowTable, Sequence

MAX_NODES = 80  # nodes of the prefix cache
MAX_ROWS = 64
MAX_CELLS = 1024
MAX_EVICTED = 128
# Values of a cell; FIRST_ROW + n is row n of the board.  If several pages share a cell, it shows the largest value.
FREE, CACHED, OTHER, SHARED, FIRST_ROW = range(5)

State = Literal["waiting", "prefill", "decoding", "retracted"]


class BoardRow(msgspec.Struct, frozen=True):
    """A request that has not ended.

    num_cached: prompt tokens that needed no computing.
    num_prefilled: tokens of the prompt with K/V, including cached ones.
    num_chunks: the most chunks that the whole prompt can take.
    waited_s: time before it first ran, or until now.
    decoding_s: time since its first token; None before that.
    age_s: time since its arrival."""

    request_id: int
    state: State
    num_prompt: int
    num_cached: int
    num_prefilled: int
    num_chunks: int
    num_output: int
    waited_s: float
    decoding_s: float | None
    age_s: float


class Pool(msgspec.Struct, frozen=True):
    """The pool as cells of ``cell_pages`` pages each, in the order of their indices; the last one may have fewer.

    runs: (number of cells, the value that they show, index of the outline's node that has them or -1).
    num_evicted: pages taken from the prefix cache so far.
    evicted: (``num_evicted`` after it, cell) for the latest evictions, latest last."""

    num_pages: int = 0
    cell_pages: int = 1
    runs: tuple[tuple[int, int, int], ...] = ()
    num_evicted: int = 0
    evicted: tuple[tuple[int, int], ...] = ()


class Board(msgspec.Struct, frozen=True):
    """A drawing of the engine at one moment.

    rows: the oldest requests.  num_hidden: number of the other requests.
    outline: the most used part of the prefix cache."""

    rows: tuple[BoardRow, ...] = ()
    num_hidden: int = 0
    pool: Pool = Pool()
    outline: Outline = Outline()


def draw_board(requests: Requests, table: RowTable, pages: PageManager, now: float) -> Board:
    """Return the board.  now: seconds of the planner's clock."""
    shown = list(islice(requests.open.values(), MAX_ROWS))
    nodes = np.full(pages.allocator.num_pages, -1, dtype=np.int32)
    outline = pages.tree.outline(MAX_NODES, nodes)
    return Board(
        rows=tuple(_row(sequence, table, requests.limits.prefill_chunk, now) for sequence in shown),
        num_hidden=len(requests.open) - len(shown),
        pool=_pool(shown, table, pages.allocator, nodes),
        outline=outline,
    )


def _row(sequence: Sequence, table: RowTable, chunk: int, now: float) -> BoardRow:
    row, num_known, num_prefilled = sequence.row, len(sequence.tokens), 0
    state: State = "retracted" if sequence.num_retractions else "waiting"
    if row >= 0:
        has_sampled = bool(table.num_known[row] > num_known)
        state = "decoding" if has_sampled else "prefill"
        num_prefilled = sequence.num_prompt if has_sampled else int(table.num_confirmed[row])
        num_known = int(table.num_known[row])
    started_at, first_token_at = sequence.started_at, sequence.first_token_at
    return BoardRow(
        request_id=sequence.request_id,
        state=state,
        num_prompt=sequence.num_prompt,
        num_cached=max(0, sequence.num_cached_at_start),
        num_prefilled=min(num_prefilled, sequence.num_prompt),
        num_chunks=-(-sequence.num_prompt // chunk),
        num_output=num_known - sequence.num_prompt,
        waited_s=(now if started_at is None else started_at) - sequence.arrived_at,
        decoding_s=None if first_token_at is None else now - first_token_at,
        age_s=now - sequence.arrived_at,
    )


def _pool(shown: list[Sequence], table: RowTable, pages: PageAllocator, nodes: Pages) -> Pool:
    num_pages = pages.num_pages
    holders = np.where(pages.is_free, FREE, CACHED).astype(np.int32)
    num_users = np.zeros(num_pages, dtype=np.int32)
    numbers = {sequence.row: index for index, sequence in enumerate(shown)}
    for row in np.flatnonzero(table.num_pages).tolist():
        held = table.page_table[row, : table.num_pages[row]]
        num_users[held] += 1
        holders[held] = FIRST_ROW + numbers[row] if row in numbers else OTHER
    holders[num_users > 1] = SHARED
    cell_pages = max(1, -(-num_pages // MAX_CELLS))
    starts = np.arange(0, num_pages, cell_pages)
    shows, holds = np.maximum.reduceat(holders, starts), np.maximum.reduceat(nodes, starts)
    changes = np.flatnonzero((np.diff(shows) != 0) | (np.diff(holds) != 0)) + 1
    firsts = np.concatenate(([0], changes))
    counts = np.diff(np.concatenate((firsts, [len(starts)])))
    return Pool(
        num_pages=num_pages,
        cell_pages=cell_pages,
        runs=tuple(zip(counts.tolist(), shows[firsts].tolist(), holds[firsts].tolist(), strict=True)),
        num_evicted=pages.num_evicted,
        evicted=tuple(islice(_evicted(pages, cell_pages), MAX_EVICTED))[::-1],
    )


def _evicted(pages: PageAllocator, cell_pages: int) -> Iterator[tuple[int, int]]:
    """Yield (``num_evicted`` after the eviction, cell), the latest first."""
    for number, evicted in reversed(pages.evicted):
        yield from ((number, cell) for cell in np.unique(evicted // cell_pages).tolist())
