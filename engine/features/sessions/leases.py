"""The pauses of sessions, and the length of the lease that each gets when its request has ended.

Owns: sessions by client and name, their pauses, the budget of each client.
Does not know: pages themselves, steps, the order of eviction.
All times are seconds of the caller's clock.
"""

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from engine.plugins.eviction.lease import LeaseOptions

MOST_SESSIONS: Final = 8192  # the one that has been unused for longest goes first
MOST_CLIENTS: Final = 256  # whose pauses are known
FIRST_LEASE_S: Final = 60.0  # while no pauses are known
MOST_PAUSES: Final = 512  # of a client, and of all; the last ones
ENOUGH: Final = 16  # pauses from which a distribution is read
SHARE: Final = 0.99  # of pauses that a lease is to last for


class SessionKey(NamedTuple):
    """A session: names of different clients are different sessions."""

    client: str
    name: str


@dataclass(slots=True)
class Session:
    """One session.  num_pages: that its lease holds.  until: when the lease ends."""

    num_open: int = 0
    ended_at: float | None = None
    num_pages: int = 0
    until: float = 0.0


class Leases:
    """The sessions of one planner.  num_pages: of the pool."""

    def __init__(self, num_pages: int, options: LeaseOptions) -> None:
        self._max_lease_s = options.max_lease_s
        self._budget = options.leased_share * num_pages
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._pauses: deque[float] = deque(maxlen=MOST_PAUSES)
        self._of_client: OrderedDict[str, deque[float]] = OrderedDict()
        self._ends: list[tuple[float, SessionKey]] = []  # a heap of the ends of leases
        self._held: Counter[str] = Counter()  # pages of each client under leases

    @property
    def num_held(self) -> int:
        """Number of pages under leases; those that sessions share count for each."""
        return self._held.total()

    def begin(self, key: SessionKey, now: float) -> None:
        """Note that a request of a session has come: its pause is over, and so is its lease."""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        if session.ended_at is not None and not session.num_open:
            self._note_pause(key.client, now - session.ended_at)
        session.num_open += 1
        self._end_lease(key, session)
        while len(self._sessions) > MOST_SESSIONS:
            gone, old = self._sessions.popitem(last=False)
            self._end_lease(gone, old)

    def end(self, key: SessionKey, now: float) -> None:
        """Note that a request of a session has ended: a pause begins."""
        if (session := self._sessions.get(key)) is not None:
            session.num_open -= 1
            session.ended_at = now

    def grant(self, key: SessionKey, num_pages: int, ttl_s: float, now: float) -> float:
        """Return the seconds of a session's lease on a prefix of so many pages; 0 for none.  ttl_s: as asked for."""
        if (session := self._sessions.get(key)) is None:
            return 0.0
        self._end_lease(key, session)
        self._end_those_before(now)
        wanted = min(ttl_s or self.expected(key.client), self._max_lease_s)
        num_clients = len(self._held.keys() | {key.client})
        if self._held[key.client] + num_pages > self._budget / num_clients or wanted <= 0:
            return 0.0
        session.num_pages, session.until = num_pages, now + wanted
        self._held[key.client] += num_pages
        heappush(self._ends, (session.until, key))
        return wanted

    def expected(self, client: str) -> float:
        """Return how long a pause may take: as the client's did where enough are known, else as those of all."""
        own = self._of_client.get(client, ())
        pauses = own if len(own) >= ENOUGH else self._pauses
        if len(pauses) < ENOUGH:
            return FIRST_LEASE_S
        return sorted(pauses)[math.ceil(SHARE * len(pauses)) - 1]

    def _note_pause(self, client: str, seconds: float) -> None:
        self._of_client.setdefault(client, deque(maxlen=MOST_PAUSES)).append(seconds)
        self._of_client.move_to_end(client)
        self._pauses.append(seconds)
        if len(self._of_client) > MOST_CLIENTS:
            self._of_client.popitem(last=False)

    def _end_lease(self, key: SessionKey, session: Session) -> None:
        self._held[key.client] -= session.num_pages
        if not self._held[key.client]:
            del self._held[key.client]
        session.num_pages = 0

    def _end_those_before(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, key = heappop(self._ends)
            session = self._sessions.get(key)
            if session is not None and session.until == until:  # it may have got another lease since
                self._end_lease(key, session)
