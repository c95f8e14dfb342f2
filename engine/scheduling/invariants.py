"""Invariants of a planner's rows and pages, which tests check after every event.

Owns: checks that read alone.  Does not know: how the planner keeps them true.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from engine.kv.node import Handle
from engine.kv.pages import PageAllocator, Pages
from engine.kv.radix import RadixTree
from engine.scheduling.rows import Rows, RowTable


def check_owners(
    allocator: PageAllocator,
    tree: RadixTree,
    table: RowTable,
    handles: Mapping[int, Handle],
    deferred: Iterable[tuple[int, Pages]],
    num_kept: int,
) -> None:
    """Raise AssertionError unless every page has exactly one owner.

    handles: by row.  deferred: wait for a step, by its number.  num_kept: prefixes that features keep."""
    allocator.check()
    tree.check()
    private = [pages for _, pages in deferred]
    for row, handle in handles.items():
        own = table.page_table[row, : table.num_pages[row]]
        shared = tree.pages(handle)
        assert np.array_equal(own[: handle.num_pages], shared), f"row {row} does not use the tree's pages"
        private.append(own[handle.num_pages :])
    held = np.concatenate(private) if private else np.zeros(0, dtype=np.int32)
    assert len(np.unique(held)) == len(held), "a page is held twice"
    num_locks = tree.num_handles
    assert num_locks == len(handles) + num_kept, (
        f"{num_locks} prefixes are locked, {len(handles)} rows have one, and features keep {num_kept}"
    )
    total = allocator.num_free + tree.num_cached + len(held)
    assert total == allocator.num_pages, (
        f"free {allocator.num_free} + cached {tree.num_cached} + held {len(held)} != {allocator.num_pages}"
    )


def check_decodes(table: RowTable, rows: Rows) -> None:
    """Raise AssertionError unless every row that decodes runs and has not been planned beyond its end."""
    for row in rows.tolist():
        assert table.running[row], f"row {row} decodes after its end"
        assert table.num_computed[row] < table.num_planned[row] <= table.max_total[row], f"row {row} ran ahead"
