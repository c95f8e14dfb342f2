"""Invariants that hold for a scheduler after every turn.

Owns: the checks that need only the scheduler and its messages.  Does not know: devices, clients.
"""

import numpy as np

from engine.features.recording.replayed import ReplayedScheduler
from engine.messages import Failed, Tokens


class Invariants:
    """The checks of one scheduler, which raise AssertionError.  every: turns between two checks of all bookkeeping."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._num_turns = 0
        self._ended: set[int] = set()

    def check(self, scheduler: ReplayedScheduler) -> None:
        """Check after a turn: every page has one owner, no message follows a request's end, nothing stays held."""
        for message in scheduler.said:
            self._note_answers(message)
        self._num_turns += 1
        planner = scheduler.planner
        if planner is None or self._num_turns % self._every:
            return
        planner.check()
        stats = planner.stats()
        if (
            scheduler.is_ready
            and not planner.num_in_flight
            and not any(num_held() for num_held in planner.features.num_held)
        ):
            assert not planner.num_open, f"{planner.num_open} requests are open, and nothing is planned for them"
        if not planner.num_open and not planner.num_in_flight:
            assert not stats.pages_used, f"no request is open, and {stats.pages_used} pages are in use"
            assert (stats.running, stats.waiting) == (0, 0), f"no request is open, but the counts are {stats}"

    def _note_answers(self, message: Tokens | Failed) -> None:
        if isinstance(message, Failed):
            self._speaks(message.request_id, ends=True)
            return
        ids = np.frombuffer(message.request_ids, dtype=np.int64).tolist()
        for request_id, finish in zip(ids, message.finishes, strict=True):
            self._speaks(request_id, ends=bool(finish))

    def _speaks(self, request_id: int, *, ends: bool) -> None:
        assert request_id not in self._ended, (
            f"request {request_id} {'ends again' if ends else 'goes on'} after its end"
        )
        if ends:
            self._ended.add(request_id)
