"""The decode half of a step: every row that samples a token in each step, and the pages it grows into.

Owns: the rows that decode.  Does not know: prompts, why a row ends, what is done when pages are short.
"""

import numpy as np

from engine.scheduling.pages import PageManager
from engine.scheduling.rows import Rows, RowTable
from engine.scheduling.step_builder import NO_APPENDS, NO_ROWS, Appends

AHEAD = 3  # If pages are plenty, rows that need one within so many steps get it together: fewer plans that do more.


class Decodes:
    """The rows that decode.  ``rows`` is replaced, never changed in place: steps in flight refer to it."""

    def __init__(self, table: RowTable, page_manager: PageManager) -> None:
        self.rows: Rows = NO_ROWS
        self._table = table
        self._page_manager = page_manager
        self._num_quiet = 0
        self._lacking: Rows | None = None  # the result of ``lack_pages``, for ``plan``

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, row: int) -> None:
        """Add a row, whose first token is being sampled."""
        self._set_rows(np.append(self.rows, np.int32(row)))

    def leave(self, row: int) -> None:
        """Remove a row.  It may be absent."""
        self._set_rows(self.rows[self.rows != row])

    def clear(self) -> None:
        """Remove all rows."""
        self._set_rows(NO_ROWS)

    def _set_rows(self, rows: Rows) -> None:
        self.rows = rows
        self.recount()

    def recount(self) -> None:
        """Forget what is known of the next steps: rows have come or gone, or moved by more than a token."""
        self._num_quiet = 0
        self._lacking = None

    def lack_pages(self) -> bool:
        """Return whether a row needs a page, none is available, and too few come back from rows that have ended."""
        if self._num_quiet > 0:
            return False
        self._lacking = self._needy()
        missing = len(self._lacking) - self._page_manager.num_available
        return missing > 0 and missing > self._pages_coming_back()

    def plan(self) -> tuple[Rows, Appends]:
        """Return the rows that compute one token each, and the pages appended for rows that grow into a new page.

        A row that needs a page and gets none is left out of the step."""
        table, rows = self._table, self.rows
        if self._num_quiet > 0:
            # No row has joined, needs a page or reaches its length: two additions are the whole plan.
            self._num_quiet -= 1
            table.num_computed[rows] += 1
            table.num_planned[rows] += 1
            return rows, NO_APPENDS
        # The rows found by ``lack_pages`` are still right, unless a row was retracted since.
        needy = self._lacking if self._lacking is not None else self._needy()
        self._lacking = None
        appends = NO_APPENDS
        if len(needy):
            if self._page_manager.num_available > 2 * len(rows):
                needy = self._needy_soon()
            served = needy[: self._page_manager.num_available]
            pages = self._page_manager.allocate(len(served), int(table.request_ids[needy[0]]))
            appends = Appends(served, table.append_pages(served, pages), pages)
            if len(served) < len(needy):
                rows = rows[~np.isin(rows, needy[len(served) :])]
        table.num_computed[rows] += 1
        table.num_planned[rows] += 1
        full = table.num_planned[rows] == table.max_total[rows]
        if full.any():
            self._set_rows(self.rows[~np.isin(self.rows, rows[full])])
        self._num_quiet = self._count_quiet_steps()
        return rows, appends

    def _needy(self) -> Rows:
        """Return the rows whose next position lies in a page that they do not have yet."""
        table, rows = self._table, self.rows
        return rows[table.num_computed[rows] >= table.num_pages[rows] * table.page_size]

    def _needy_soon(self) -> Rows:
        """Return the rows that will need a page within the next ``AHEAD`` steps."""
        table, rows = self._table, self.rows
        room = table.num_pages.take(rows) * table.page_size
        soon = (table.num_computed.take(rows) >= room - AHEAD) & (table.max_total.take(rows) - 1 > room)
        return rows[soon]

    def _pages_coming_back(self) -> int:
        """Return the number of pages of rows that only wait for a step in flight: they end, or have ended."""
        table = self._table
        return int(table.num_pages[~table.running | (table.num_planned == table.max_total)].sum())

    def _count_quiet_steps(self) -> int:
        """Return the number of steps until a row needs a page or samples its last token."""
        table, rows = self._table, self.rows
        if not len(rows):
            return 0
        until_page = table.num_pages[rows] * table.page_size - table.num_computed[rows]
        until_end = table.max_total[rows] - table.num_planned[rows] - 1
        return int(min(until_page.min(), until_end.min()))
