"""The board beside what the planner has really done: states, pages of each request, evictions, and its bounds."""

import numpy as np

from engine.scheduling.board import CACHED, FIRST_ROW, FREE, MAX_CELLS, MAX_ROWS, SHARED, Board, draw_board
from tests.scheduling.bench import Bench, prompt_of


def board_of(bench: Bench) -> Board:
    planner = bench.planner
    return draw_board(planner.requests, planner.table, planner.pages, bench.now)


def cells(board: Board) -> tuple[list[int], list[int]]:
    """What each cell shows, and the node that has it."""
    counts, shows, nodes = zip(*board.pool.runs, strict=True)
    return np.repeat(shows, counts).tolist(), np.repeat(nodes, counts).tolist()


def test_requests_are_told_from_their_arrival_to_their_tokens() -> None:
    bench = Bench(max_running=1, prefill_chunk=8, max_step_tokens=8, depth=1)
    bench.submit(1, prompt_of(20), max_tokens=6, ignore_eos=True)
    bench.submit(2, prompt_of(5, seed=2), max_tokens=6, ignore_eos=True)
    assert [(row.state, row.num_chunks) for row in board_of(bench).rows] == [("waiting", 3), ("waiting", 1)]
    bench.now = 1.0
    bench.step()
    first, second = board_of(bench).rows
    assert (first.state, first.num_prefilled, first.num_output, first.waited_s) == ("prefill", 8, 0, 1.0)
    assert (second.state, second.num_prefilled) == ("waiting", 0)
    for _ in range(4):
        bench.step()
    bench.now = 3.0
    first = board_of(bench).rows[0]
    assert (first.state, first.num_prefilled, first.num_output, first.decoding_s) == ("decoding", 20, 3, 2.0)
    bench.finish()
    assert board_of(bench).rows == ()


def test_who_loses_a_row_is_retracted() -> None:
    bench = Bench(num_pages=12, max_running=4)
    bench.expect_short_outputs()
    for number in range(4):
        bench.submit(number, prompt_of(8, seed=number), max_tokens=30, ignore_eos=True)
    while "retracted" not in {row.state for row in board_of(bench).rows}:
        assert bench.plan() or bench.deliver(), "nobody was retracted"
    bench.finish()


def test_every_page_is_shown_as_who_has_it() -> None:
    bench = Bench(num_pages=16, page_size=4, depth=1)
    bench.submit(1, prompt_of(16), max_tokens=4, ignore_eos=True)
    bench.finish()
    shows, nodes = cells(board_of(bench))
    assert shows.count(CACHED) == bench.planner.stats().pages_cached == 4
    assert shows.count(FREE) == 12
    assert [node >= 0 for node in nodes] == [show == CACHED for show in shows]
    bench.submit(2, [*prompt_of(16), 5, 6], max_tokens=9, ignore_eos=True)
    bench.submit(3, [*prompt_of(16), 7, 8], max_tokens=9, ignore_eos=True)
    bench.step()
    board = board_of(bench)
    shows, nodes = cells(board)
    assert shows.count(SHARED) == 4
    assert {nodes[at] for at, show in enumerate(shows) if show == SHARED} == {0}
    assert [shows.count(FIRST_ROW + at) for at in (0, 1)] == [1, 1]
    assert board.outline.nodes[0].num_pages == 4
    bench.finish()


def test_evictions_are_counted_and_the_latest_are_named() -> None:
    bench = Bench(num_pages=8, page_size=4)
    for number in range(4):
        bench.submit(number, prompt_of(16, seed=number), max_tokens=4, ignore_eos=True)
        bench.finish()
    pool = board_of(bench).pool
    assert pool.num_evicted >= 8
    assert pool.evicted[-1][0] == pool.num_evicted
    assert {cell for _, cell in pool.evicted} <= set(range(8))


def test_a_board_stays_small_whatever_is_there() -> None:
    bench = Bench(num_pages=10 * MAX_CELLS + 1, page_size=1, max_running=100, max_step_tokens=4096)
    for number in range(MAX_ROWS + 20):
        bench.submit(number, prompt_of(30, seed=number), max_tokens=8, ignore_eos=True)
    bench.step()
    board = board_of(bench)
    assert (len(board.rows), board.num_hidden) == (MAX_ROWS, 20)
    assert (board.pool.cell_pages, board.pool.num_pages) == (11, 10 * MAX_CELLS + 1)
    assert sum(count for count, _, _ in board.pool.runs) <= MAX_CELLS
    bench.finish()
