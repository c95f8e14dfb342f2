"""What a replayed planner does, and why, in words.

Owns: where to listen, and the sentences.  Does not know: where turns come from, how a sentence is shown.
It hangs on to one planner's own methods, so that planning itself has no part in telling.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.kv.pages import Pages
from engine.messages import FetchPages, Finish, Step
from engine.scheduling.pages import Fetched
from engine.scheduling.planner import Planner
from engine.scheduling.rows import Sequence

MOST_ROWS = 6  # of a list, in a sentence


class Reasons:
    """Of one planner, which others may take the place of."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._rows = planner._rows
        self._pages = planner._page_manager
        self._told: list[str] = []
        self._waits = ""
        _wrap(self._pages, "start", self._start)
        _wrap(self._pages.allocator, "evict", self._evict)
        _wrap(planner._prefills, "_stands_aside", self._stands_aside)
        _wrap(planner._fetches, "ask", self._ask)
        _wrap(planner, "_retract", self._retract)
        _wrap(planner.requests, "end", self._end)

    def take(self) -> list[str]:
        """Sentences since the last call."""
        told, self._told = self._told, []
        return told

    # ---- as it happens ----------------------------------------------------------------------

    def _start(
        self, start: Callable[..., int | None], sequence: Sequence, reserve: int, fetched: Fetched | None = None
    ) -> int | None:
        available, cached = self._pages.num_available, self._pages.num_cached_tokens(sequence)
        row = start(sequence, reserve, fetched)
        count, size = len(sequence.tokens), self._rows.page_size
        new = -(-count // size) - cached // size
        kept = f", {reserve} more stay for those that run to grow" if reserve else ""
        needs = f"{count} tokens, {cached} of them cached, need {new} pages{kept}; {available} are available"
        if row is not None:
            self._told.append(f"request {sequence.request_id} starts in row {row}: {needs}")
            self._waits = ""
        else:
            why = "no adapter slot is free" if not self._rows.has_slot(sequence) else needs
            waits = f"request {sequence.request_id} is first and waits: {why}"
            if waits != self._waits:
                self._told.append(waits)
            self._waits = waits
        return row

    def _evict(self, evict: Callable[[Pages], None], pages: Pages) -> None:
        evict(pages)
        self._told.append(f"{len(pages)} cached pages evicted, of those that the strategy ranks lowest: {_few(pages)}")

    def _stands_aside(self, stands_aside: Callable[[Sequence], bool], sequence: Sequence) -> bool:
        aside = stands_aside(sequence)
        if aside:
            self._told.append(f"request {sequence.request_id} waits for a prefix that another one is computing")
        return aside

    def _ask(self, ask: Callable[[Sequence], bool], sequence: Sequence) -> bool:
        asked = ask(sequence)
        if asked:
            self._told.append(f"request {sequence.request_id} waits for pages from the store")
        return asked

    def _retract(self, retract: Callable[[Sequence], None], victim: Sequence) -> None:
        if self.planner._quarantine.is_on:
            why = "it ran alone after executors were lost, and the next suspect's turn has come"
        else:
            needy, available = len(self.planner._decodes._needy()), self._pages.num_available
            why = (
                f"{needy} rows need a page and {available} are available; it is the youngest of the least urgent "
                f"(priority {victim.priority})"
            )
        row = victim.row
        retract(victim)
        self._told.append(f"request {victim.request_id} loses row {row} and waits again: {why}")

    def _end(self, end: Callable[..., None], sequence: Sequence, finish: Finish, num_known: int) -> None:
        end(sequence, finish, num_known)
        where = f"row {sequence.row}" if sequence.row >= 0 else "the queue"
        count = num_known - sequence.num_prompt
        self._told.append(f"request {sequence.request_id} ends in {where}: {finish.name}, {count} tokens of output")

    # ---- what is planned --------------------------------------------------------------------

    def of(self, plan: Step | FetchPages) -> str:
        """Returns a plan in a line."""
        if isinstance(plan, FetchPages):
            num_pages = len(plan.tokens) // (4 * self._rows.page_size)
            return f"fetch {plan.fetch_id}: {num_pages} pages from the store, for {plan.timeout_s:g} s at most"
        decodes, rows = _ints(plan.decode_rows), _ints(plan.prefill_rows)
        parts = [f"{len(decodes)} rows decode"] if len(decodes) else []
        segments = zip(rows, _ints(plan.prefill_starts), _ints(plan.prefill_lengths), strict=True)
        for (row, start, length), samples in zip(segments, _ints(plan.prefill_samples), strict=True):
            end = " to its end" if samples == 1 else f", {samples - 1} of them proposed" if samples else ""
            parts.append(f"request {self._rows.request_ids[row]} (row {row}) computes {start}:{start + length}{end}")
        for count, what in (
            (len(plan.table_pages) // 4, "pages appended or replaced"),
            (_ints(plan.transfer_to_host).tolist().count(1), "pages to the host"),
            (_ints(plan.transfer_to_host).tolist().count(0), "pages from the host"),
            (len(plan.save_pages) // 4, "pages to the store"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return f"step {plan.step_id}: {', '.join(parts)}"


def _ints(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype=np.int32)


def _few(pages: Pages) -> str:
    shown = ", ".join(map(str, pages[:MOST_ROWS].tolist()))
    return shown if len(pages) <= MOST_ROWS else f"{shown} ..."


def _wrap(owner: Any, name: str, watcher: Callable[..., Any]) -> None:
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: watcher(method, *arguments))
