"""The pages under leases of each session, for operators and clients.

Owns: which sessions are known.  Does not know: how leases are granted, names of sessions.
The server adds this watcher where sessions have leases.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from engine.features.sessions.leases import MOST_SESSIONS, Session, SessionKey
from engine.features.sessions.planner import NAME
from engine.messages import Admit
from engine.scheduling.events import PlannerWatcher
from engine.scheduling.requests import Requests
from engine.scheduling.rows import Sequence


class Holding(msgspec.Struct, frozen=True):
    """The leases of one session.  digest: of its name.  num_pages: under leases.  seconds: until the last one ends."""

    client: str
    digest: str
    num_pages: int
    seconds: float


class SessionHoldings(PlannerWatcher):
    """The sessions of an engine.

    The argument of its view is a list of ``SessionKey``, the view a list of ``Holding``, of those that hold pages."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def arrived(self, sequence: Sequence, message: Admit) -> None:
        """Note the session of a request."""
        if (note := sequence.notes.get(NAME)) is not None:
            self._sessions[note.key] = note.session
            self._sessions.move_to_end(note.key)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def view(self, argument: bytes, requests: Requests, now: float) -> bytes:
        """Return the holdings of now.  The scheduler waits meanwhile, so only sessions that are asked for are read."""
        found = []
        for key in msgspec.msgpack.decode(argument, type=list[SessionKey]):
            session = self._sessions.get(key)
            leases = [] if session is None else [one for one in session.leases if one.num_pages and one.until > now]
            if leases:
                last = max(one.until for one in leases)
                found.append(Holding(key.client, key.name, sum(one.num_pages for one in leases), last - now))
        return msgspec.msgpack.encode(found)


def asked_for(keys: Iterable[SessionKey]) -> dict[str, bytes]:
    """Return the argument for a snapshot's ``views`` that requests the holdings of these sessions."""
    return {NAME: msgspec.msgpack.encode(list(keys))}


def holdings_in(views: dict[str, bytes]) -> list[Holding]:
    """Return the holdings in the views of a snapshot."""
    return msgspec.msgpack.decode(views[NAME], type=list[Holding]) if NAME in views else []
