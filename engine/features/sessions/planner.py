"""Sessions in the planner: which row has which session, and the lease that its prefix gets when the row leaves.

Owns: the sessions of rows, the rate of steps.  Does not know: how long a lease is, which prefix is evicted.
A lease is a priority of the row's handle: the strategy ``eviction.lease`` reads it in the prefix that is unlocked.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.features.sessions.leases import Leases, Session, SessionKey
from engine.features.sessions.returns import Absence, Returns
from engine.kv.node import Handle, Namespace
from engine.kv.pages import Pages
from engine.messages import Admit
from engine.plugins.eviction.lease import LeaseOptions, leased
from engine.plugins.features import FeatureContext
from engine.plugins.kinds import named
from engine.plugins.options import decode_options
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import StepBuilder
from engine.types.prompt import RequestPart

NAME: Final = "sessions"
WINDOW_S: Final = 20.0  # in which steps are counted
LEAST_S: Final = 1.0  # from which a rate is read


def session_part(name: str, ttl_s: float = 0.0) -> RequestPart:
    """Return the part of a request that belongs to a session.

    ttl_s: how long its prefix is to stay, 0 for as long as pauses take.  The part has the name's digest, not the name,
    as recordings keep it."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return RequestPart(digest=digest, data=msgspec.msgpack.encode(ttl_s))


def ttl_of(part: RequestPart) -> float:
    """Return the time for which a session's prefix is to stay; a recorded part has none."""
    return msgspec.msgpack.decode(part.data, type=float) if part.data else 0.0


@dataclass(slots=True)
class SessionNote:
    """A sequence's session.  lease_s: what it got when the sequence left its row last."""

    key: SessionKey
    session: Session
    ttl_s: float
    lease_s: float = 0.0
    handle: Handle | None = None


class SessionsPlanner(PlannerFeature):
    """The sessions of one planner's rows."""

    def __init__(self, parts: PlannerParts, leases: Leases, *, fetches: bool = False) -> None:
        self._clock = parts.clock
        self._pages = parts.pages
        self._table = parts.table
        self._num_behind = parts.limits.lookahead
        self._leases = leases
        # A state is at few of a prefix's pages, so its pages alone are of no use to a hybrid model.
        self._returns = Returns(parts.pages, leases) if fetches and not parts.limits.state_bytes else None
        self._of_row: dict[int, SessionNote] = {}
        self._since = (parts.clock(), 0)  # a time, and the step that was planned then
        self._rate = 0.0  # steps per second before that

    def admit(self, sequence: Sequence, message: Admit) -> None:
        if (part := message.parts.get(NAME)) is not None:
            now, key = self._clock(), SessionKey(sequence.origin.client, part.digest)
            sequence.notes[NAME] = SessionNote(key, self._leases.begin(key, now), ttl_of(part))
            if self._returns is not None:
                self._returns.end(key)
            self._steps_per_second(now, self._pages.tree.now)  # so that an idle time before it is left out

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        if (note := sequence.notes.get(NAME)) is not None:
            note.handle = handle

    def started(self, sequence: Sequence) -> None:
        if (note := sequence.notes.get(NAME)) is not None:
            self._of_row[sequence.row] = note
            if note.handle is not None:
                self._leases.found(note.key, note.handle)

    def released(self, row: int) -> None:
        """Give the row's session a lease on what its handle keeps, which is unlocked next."""
        if (note := self._of_row.pop(row, None)) is None or note.handle is None:
            return
        handle, note.handle = note.handle, None
        now, step = self._clock(), self._pages.tree.now
        note.lease_s = self._leases.grant(note.key, handle, note.ttl_s, now)
        if note.lease_s:
            until = step + round(note.lease_s * self._steps_per_second(now, step))
            handle.priority = leased(until)
            sequence = self._table.sequences[row]
            if self._returns is not None and sequence is not None:
                num_tokens = handle.num_pages * self._pages.tree.page_size + self._num_behind
                prefix = self._pages.tree.key(self._table.tokens[row, :num_tokens])
                space = Namespace(sequence.cache_salt, sequence.weights)
                self._returns.begin(note.key, Absence(note.session, prefix, space, now, until, sequence.request_id))

    def plan(self, step: StepBuilder) -> None:
        """Let prefixes on the host come back with the step."""
        if self._returns is not None:
            self._returns.fetch(self._clock())

    def ended(self, sequence: Sequence) -> None:
        if (note := sequence.notes.get(NAME)) is not None:
            self._leases.end(note.key, self._clock())

    def pages_lost(self) -> None:
        """End all leases: the cache is empty."""
        self._leases.clear()
        if self._returns is not None:
            self._returns.clear()

    def reset(self) -> list[Sequence]:
        """Forget the rows, and end all leases."""
        self._of_row.clear()
        self.pages_lost()
        return []

    def gauges(self) -> dict[str, int]:
        self._leases.expire(self._clock())
        num_fetched = 0 if self._returns is None else self._returns.num_fetched
        return {"leased_pages": self._leases.num_held, "fetched_pages": num_fetched}

    def _steps_per_second(self, now: float, step: int) -> float:
        since, step_then = self._since
        elapsed = now - since
        if elapsed < LEAST_S:
            return self._rate
        rate = (step - step_then) / elapsed
        if elapsed > 2 * WINDOW_S:  # with an idle time in it
            self._since = (now, step)
            return self._rate or rate
        if elapsed >= WINDOW_S:
            self._since, self._rate = (now, step), rate
        return max(rate, self._rate)


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None unless the strategy of eviction reads leases."""
    if named(context.config.plugins, "eviction") != "lease":
        return None
    given = context.config.plugins.options.get("eviction.lease", {})
    options = decode_options("eviction.lease", given, LeaseOptions)
    return lambda parts: SessionsPlanner(parts, Leases(parts.limits.num_pages, options), fetches=options.fetches)
