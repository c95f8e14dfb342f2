"""Who waits for pages from the store: a sequence whose turn has come, and of whose prefix the store may have more.

Owns: what was asked of the executors, and what each of them has answered.
Does not know: the store, rows, the queue; it says who must wait, and who need not any more.
A sequence asks once before each start, when it is first in the queue.  The executors answer within the limit of time,
with what they have by then; the pages they keep are the sequence's until it starts or ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import FetchPages, PagesFetched
from engine.scheduling.pages import Fetched, PageManager
from engine.scheduling.rows import WORTH_WAITING_TOKENS, PlannerLimits, Sequence
from engine.scheduling.timelines import Timelines

TOKEN_BYTES = 4
MOST_WAITING = 8  # so many at once keep a store busy; those behind them keep their places in the queue


@dataclass(slots=True)
class _Fetch:
    """num_pages: what every rank that has answered has.  num_unanswered: ranks that have not."""

    fetch_id: int
    sequence: Sequence
    first_page: int
    num_pages: int
    num_unanswered: int


class Fetches:
    """may_ask: whether somebody may wait here now."""

    def __init__(
        self, limits: PlannerLimits, page_manager: PageManager, may_ask: Callable[[], bool], timelines: Timelines
    ) -> None:
        self._limits = limits
        self._page_manager = page_manager
        self._may_ask = may_ask
        self._timelines = timelines
        self._asked: list[FetchPages] = []
        self._waiting: dict[int, _Fetch] = {}  # by fetch
        self._answered: dict[int, Fetched] = {}  # by request
        self._num_asked = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def are_full(self) -> bool:
        """Whether no other sequence may wait now."""
        return len(self._waiting) >= MOST_WAITING

    def ask(self, sequence: Sequence) -> bool:
        """Whether the sequence, whose turn it is, must wait for the store; ``arrived`` gives it back."""
        if not self._limits.store_timeout_s or sequence.request_id in self._answered or not self._may_ask():
            return False
        first_page, parent, tokens = self._page_manager.missing(sequence)
        if len(tokens) < WORTH_WAITING_TOKENS * TOKEN_BYTES:
            return False
        fetch_id = self._num_asked
        self._num_asked += 1
        num_pages = len(tokens) // (TOKEN_BYTES * self._limits.page_size)
        self._waiting[fetch_id] = _Fetch(fetch_id, sequence, first_page, num_pages, self._limits.num_ranks)
        self._timelines.mark(sequence, "fetch")
        self._asked.append(
            FetchPages(fetch_id=fetch_id, parent=parent, tokens=tokens, timeout_s=self._limits.store_timeout_s)
        )
        return True

    def take_asked(self) -> list[FetchPages]:
        """What to tell the executors, since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def arrived(self, message: PagesFetched) -> Sequence | None:
        """Take one rank's answer.  Returns the sequence that need not wait any more, if it is the last one."""
        fetch = self._waiting.get(message.fetch_id)
        if fetch is None:
            return None  # it ended meanwhile, or asked executors that were lost
        fetch.num_pages = min(fetch.num_pages, message.num_pages)
        fetch.num_unanswered -= 1
        if fetch.num_unanswered:
            return None
        del self._waiting[fetch.fetch_id]
        self._answered[fetch.sequence.request_id] = Fetched(fetch.fetch_id, fetch.first_page, fetch.num_pages)
        return fetch.sequence

    def of(self, sequence: Sequence) -> Fetched | None:
        """What was fetched for the sequence."""
        return self._answered.get(sequence.request_id)

    def started(self, sequence: Sequence) -> None:
        """The sequence has its row; should it wait once more, it asks once more."""
        self._answered.pop(sequence.request_id, None)

    def forget(self, sequence: Sequence) -> bool:
        """The sequence has ended.  Returns whether it waited here."""
        if (fetched := self._answered.pop(sequence.request_id, None)) is not None:
            self._page_manager.moves.let_go(fetched.fetch_id)
        for fetch in self._waiting.values():
            if fetch.sequence is sequence:
                del self._waiting[fetch.fetch_id]
                self._page_manager.moves.let_go(fetch.fetch_id)
                return True
        return False

    def clear(self) -> list[Sequence]:
        """The executors are gone, with all they had; returns who waited for it."""
        sequences = [fetch.sequence for fetch in self._waiting.values()]
        self._waiting.clear()
        self._answered.clear()
        self._asked.clear()
        return sequences
