"""Prefixes of sessions in a pause that wait in host memory: they are fetched back before their sessions return.

Owns: which sessions pause, which of them are looked at, how much is fetched at once.
Does not know: budgets of leases, how long pauses take, how pages are copied: a tree with two tiers does that.
A fetch takes free pages, and those of prefixes whose use and lease are over.  What comes back is evictable at once, so
running requests never wait for it; and a step copies few pages, as it takes longer with each.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np

from engine.features.sessions.leases import Leases, Session, SessionKey
from engine.kv.eviction import SortKey
from engine.kv.match import Match
from engine.kv.node import NO_PAGES, Handle, Namespace
from engine.kv.pages import Pages
from engine.plugins.eviction.lease import leased
from engine.scheduling.pages import PageManager

LOOK_EVERY_S: Final = 0.02
MOST_LOOKS: Final = 8  # sessions at once
MOST_PAGES: Final = 16  # fetched at once
WITHIN_S: Final = 2.0  # in which a session must be likely to return
LEAST_CHANCE: Final = 0.25


@runtime_checkable
class FetchingTree(Protocol):
    """A tree whose pages can wait in another tier."""

    def match(self, key: bytes, namespace: Namespace) -> Match: ...
    def lock(self, match: Match, priority: int) -> Handle: ...
    def unlock(self, handle: Handle) -> None: ...
    def restore(self, handle: Handle, key: bytes, pages: Pages) -> int: ...
    def next_out(self) -> tuple[SortKey, int] | None: ...


@dataclass(frozen=True, slots=True)
class Absence:
    """A session's prefix between two requests.  until: the step of its lease's end.  request_id: of the last one."""

    session: Session
    key: bytes
    namespace: Namespace
    since: float
    until: int
    request_id: int


class Returns:
    """The pauses of one planner.  num_fetched: pages that came back so far."""

    def __init__(self, pages: PageManager, leases: Leases) -> None:
        self.num_fetched = 0
        self._pages = pages
        self._leases = leases
        self._pauses: OrderedDict[SessionKey, Absence] = OrderedDict()
        self._looked_at = 0.0

    def begin(self, key: SessionKey, pause: Absence) -> None:
        """Note that a session's prefix has a lease and its request has ended."""
        self._pauses[key] = pause

    def end(self, key: SessionKey) -> None:
        """Note that a session has returned: what its request needs comes with it."""
        self._pauses.pop(key, None)

    def clear(self) -> None:
        """Forget all pauses, since nothing is cached any more."""
        self._pauses.clear()

    def fetch(self, now: float) -> None:
        """Fetch prefixes of some sessions that are likely to return soon, in turn."""
        tree = self._pages.tree
        if now - self._looked_at < LOOK_EVERY_S or not isinstance(tree, FetchingTree):
            return
        self._looked_at, left = now, MOST_PAGES
        for key in [*self._pauses][:MOST_LOOKS]:
            pause = self._pauses[key]
            if pause.until <= self._pages.tree.now:
                del self._pauses[key]
                continue
            self._pauses.move_to_end(key)
            if pause.session.num_open or self._leases.chance(key.client, now - pause.since, WITHIN_S) < LEAST_CHANCE:
                continue
            left -= self._fetch(tree, pause, left)
            if not left:
                break

    def _fetch(self, tree: FetchingTree, pause: Absence, most: int) -> int:
        """Fetch at most so many pages of a prefix.  Return their number."""
        match = tree.match(pause.key, pause.namespace)
        wanted = min(match.num_host_pages, most)
        if not wanted:
            return 0
        handle = tree.lock(match, leased(pause.until))  # so that making room takes none of it
        room = self._room(tree, pause.request_id, wanted)
        # Pages that have made room went to the host, and may have taken the place of these.
        count = min(len(room), tree.match(pause.key, pause.namespace).num_host_pages)
        taken = tree.restore(handle, pause.key, room[:count])
        self._pages.allocator.free(room[taken:])
        tree.unlock(handle)
        self.num_fetched += taken
        return taken

    def _room(self, tree: FetchingTree, request_id: int, wanted: int) -> Pages:
        """Return at most so many pages: free ones, and those of prefixes that count as used no longer."""
        allocate, found = self._pages.allocate, [NO_PAGES]
        if num_free := min(wanted, self._pages.allocator.num_free):
            found.append(allocate(num_free, request_id))
            wanted -= num_free
        while wanted and (out := tree.next_out()) is not None and out[0] < (self._pages.tree.now,):
            count = min(wanted, out[1])
            found.append(allocate(count, request_id))
            wanted -= count
        return np.concatenate(found)
