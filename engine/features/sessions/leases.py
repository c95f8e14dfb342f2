"""The pauses of sessions, and the length of the lease that each gets when its request has ended.

Owns: sessions by client and name, their pauses, the budget of each client.
Does not know: what pages hold, steps, the order of eviction.
A prefix keeps its place in the order of eviction up to the end of its lease, also when its session has begun something
else.  So its pages count up to then, but those that a later lease of the session has in its prefix too.
All times are seconds of the caller's clock.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

from engine.kv.node import Handle, Node
from engine.plugins.eviction.lease import LeaseOptions

MOST_SESSIONS: Final = 8192  # the one that has been unused for longest goes first
MOST_CLIENTS: Final = 256  # whose pauses are known
FIRST_LEASE_S: Final = 60.0  # while no pauses are known
MOST_PAUSES: Final = 512  # of a client, and of all; the last ones
ENOUGH: Final = 16  # pauses from which a distribution is read
SHARE: Final = 0.99  # of pauses that a lease is to last for
MOST_LEASES: Final = 16  # of a session, that later ones are compared with: the last ones
RETURNING: Final = 0.25  # of a client's sessions: where fewer come back, one that has not has no lease


class SessionKey(NamedTuple):
    """A session: names of different clients are different sessions."""

    client: str
    name: str


@dataclass(slots=True, eq=False)
class Lease:
    """One lease.  num_pages: pages that count for it.  prefix: the end of its prefix, None once the lease has ended."""

    client: str
    num_pages: int
    prefix: Node | None
    until: float

    def num_beside(self, path: set[Node]) -> int:
        """Return how many of its pages are not on the path to another prefix."""
        num_pages, node = 0, self.prefix
        while node is not None and node not in path:
            num_pages += node.num_pages
            node = node.parent
        return min(num_pages, self.num_pages)


@dataclass(slots=True)
class Session:
    """One session.  until: up to when the pages that its requests have found are leased.

    has_returned: whether a request has come after the end of another one."""

    num_open: int = 0
    has_returned: bool = False
    ended_at: float | None = None
    leases: list[Lease] = field(default_factory=list)
    until: float = 0.0


class _Pauses:
    """The last pauses, in the order in which they ended and in that of their lengths."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self.sorted: list[float] = []

    def append(self, seconds: float) -> None:
        """Note one, and forget the oldest of too many."""
        self._last.append(seconds)
        insort(self.sorted, seconds)
        if len(self._last) > MOST_PAUSES:
            del self.sorted[bisect_left(self.sorted, self._last.popleft())]


@dataclass(slots=True)
class _Habits:
    """The pauses of a client's sessions, the last ones, and how many of its sessions have come back."""

    pauses: _Pauses = field(default_factory=_Pauses)
    num_sessions: int = 0
    num_returned: int = 0

    def begin(self) -> None:
        """Count a session.  Those of long ago count less."""
        self.num_sessions += 1
        if self.num_sessions > MOST_PAUSES:
            self.num_sessions, self.num_returned = self.num_sessions // 2, self.num_returned // 2

    @property
    def come_back(self) -> bool:
        """Whether a session is likely to come back, also while few are known."""
        num_gone = self.num_sessions - self.num_returned
        return num_gone <= ENOUGH or self.num_returned >= RETURNING * self.num_sessions


class Leases:
    """The sessions of one planner.  num_pages: of the pool."""

    def __init__(self, num_pages: int, options: LeaseOptions) -> None:
        self._max_lease_s = options.max_lease_s
        self._budget = options.leased_share * num_pages
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._pauses = _Pauses()
        self._of_client: OrderedDict[str, _Habits] = OrderedDict()
        self._ends: list[tuple[float, int, Lease]] = []  # a heap of the ends of leases, with their numbers
        self._num_granted = 0
        self._held: Counter[str] = Counter()  # pages of each client under leases

    @property
    def num_held(self) -> int:
        """Number of pages under leases; those that sessions share count for each."""
        return self._held.total()

    def begin(self, key: SessionKey, now: float) -> Session:
        """Note that a request of a session has come: its pause is over.  Return the session."""
        self.expire(now)
        habits = self._habits(key.client)
        if (session := self._sessions.get(key)) is None:
            session = self._sessions[key] = Session()
            habits.begin()
        self._sessions.move_to_end(key)
        if session.ended_at is not None and not session.num_open:
            habits.pauses.append(now - session.ended_at)
            self._pauses.append(now - session.ended_at)
            habits.num_returned += not session.has_returned
            session.has_returned = True
        session.num_open += 1
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def end(self, key: SessionKey, now: float) -> None:
        """Note that a request of a session has ended: a pause begins."""
        if (session := self._sessions.get(key)) is not None:
            session.num_open = max(session.num_open - 1, 0)  # it may have been forgotten since it began
            session.ended_at = now

    def grant(self, key: SessionKey, handle: Handle, ttl_s: float, now: float) -> float:
        """Return the seconds of a session's lease on what a handle keeps; 0 for none.  ttl_s: as asked for."""
        self.expire(now)
        session = self._sessions.get(key)
        wanted = min(ttl_s or self.expected(key.client), self._max_lease_s)
        if session is None or not handle.num_pages or wanted <= 0:
            return 0.0
        if not session.has_returned and not ttl_s and not self._habits(key.client).come_back:
            return 0.0
        path = _path(handle.node)
        beside = [one.num_beside(path) for one in session.leases]
        num_more = handle.num_pages - sum(one.num_pages for one in session.leases) + sum(beside)
        num_clients = len(self._held.keys() | {key.client})
        if self._held[key.client] + num_more > self._budget / num_clients:
            return 0.0
        lease = Lease(key.client, handle.num_pages, handle.node, max(now + wanted, session.until))
        for one, num_beside in zip(session.leases, beside, strict=True):
            if num_beside < one.num_pages:  # the new one counts for the rest, so it lasts as long
                lease.until = max(lease.until, one.until)
                one.num_pages, one.prefix = num_beside, one.prefix if num_beside else None
        session.leases = [*(one for one in session.leases if one.num_pages), lease][-MOST_LEASES:]
        self._held[key.client] += num_more
        self._num_granted += 1
        heappush(self._ends, (lease.until, self._num_granted, lease))
        return wanted

    def found(self, key: SessionKey, handle: Handle) -> None:
        """Give back what a session's request has found: it is locked now, and counts again with the next lease."""
        if (session := self._sessions.get(key)) is None:
            return
        path = _path(handle.node)
        for one in session.leases:
            if (num_beside := one.num_beside(path)) < one.num_pages:
                session.until = max(session.until, one.until)
                self._held[key.client] -= one.num_pages - num_beside
                one.num_pages = num_beside
        if not self._held[key.client]:
            del self._held[key.client]

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            lease = heappop(self._ends)[-1]
            self._held[lease.client] -= lease.num_pages
            if not self._held[lease.client]:
                del self._held[lease.client]
            lease.num_pages, lease.prefix = 0, None

    def clear(self) -> None:
        """End all leases, since nothing is cached any more.  The pauses stay."""
        self.expire(math.inf)
        for session in self._sessions.values():
            session.leases, session.until = [], 0.0

    def expected(self, client: str) -> float:
        """Return how long a pause may take: as the client's did where enough are known, else as those of all."""
        pauses = self._known(client)
        return pauses[math.ceil(SHARE * len(pauses)) - 1] if len(pauses) >= ENOUGH else FIRST_LEASE_S

    def chance(self, client: str, age: float, within: float) -> float:
        """Return how many of the pauses that are longer than ``age`` end within so many seconds; 0 if few are known."""
        pauses = self._known(client)
        first = bisect_right(pauses, age)
        if len(pauses) < ENOUGH or first == len(pauses):
            return 0.0
        return (bisect_right(pauses, age + within) - first) / (len(pauses) - first)

    def _known(self, client: str) -> list[float]:
        own = self._habits(client).pauses.sorted
        return own if len(own) >= ENOUGH else self._pauses.sorted

    def _habits(self, client: str) -> _Habits:
        found = self._of_client.setdefault(client, _Habits())
        self._of_client.move_to_end(client)
        if len(self._of_client) > MOST_CLIENTS:
            self._of_client.popitem(last=False)
        return found


def _path(node: Node | None) -> set[Node]:
    """Return a prefix's nodes."""
    found = set()
    while node is not None:
        found.add(node)
        node = node.parent
    return found
