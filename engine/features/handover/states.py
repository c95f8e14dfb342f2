"""The states of a transfer on both sides, and what leads from one to the next.

Owns: the two tables, which the sides follow and from which the diagram in the documentation is drawn.
Does not know: what a side does on the way.  A message that the table does not list for a state is ignored there: it is
late, doubled, or of a transfer that was never made.
"""

from enum import Enum
from typing import Final

from engine.features.handover.messages import (
    Acknowledge,
    CancelBorrow,
    Claim,
    Decline,
    Deny,
    Fetch,
    Grant,
    Lend,
    ReleasePages,
)


class GroupsArrived:
    """The last group that was missing has arrived."""


class PagesLanded:
    """A step has copied the pages into the pool."""


class Lapsed:
    """The time is over: of a lease, or of a whole transfer."""


class Unread:
    """No page of the loan is being read any more."""


class Borrowing(Enum):
    """The states of a transfer at the rank that wants pages."""

    CLAIMED = "claimed"
    FETCHING = "fetching"
    WHOLE = "whole"
    PARTIAL = "partial"
    DROPPED = "dropped"
    LANDED = "landed"


class Lending(Enum):
    """The states of a transfer at the rank that has the pages."""

    ASKED = "asked"
    LENT = "lent"
    RETURNING = "returning"
    OVER = "over"


BORROWING: Final[dict[tuple[Borrowing, type], Borrowing]] = {
    (Borrowing.CLAIMED, Grant): Borrowing.FETCHING,
    (Borrowing.CLAIMED, Deny): Borrowing.PARTIAL,
    (Borrowing.CLAIMED, Lapsed): Borrowing.PARTIAL,
    (Borrowing.CLAIMED, CancelBorrow): Borrowing.DROPPED,
    (Borrowing.FETCHING, GroupsArrived): Borrowing.WHOLE,
    (Borrowing.FETCHING, Deny): Borrowing.PARTIAL,
    (Borrowing.FETCHING, Lapsed): Borrowing.PARTIAL,
    (Borrowing.FETCHING, CancelBorrow): Borrowing.DROPPED,
    (Borrowing.WHOLE, PagesLanded): Borrowing.LANDED,
    (Borrowing.PARTIAL, PagesLanded): Borrowing.LANDED,
    (Borrowing.WHOLE, CancelBorrow): Borrowing.DROPPED,
    (Borrowing.PARTIAL, CancelBorrow): Borrowing.DROPPED,
}

LENDING: Final[dict[tuple[Lending, type], Lending]] = {
    (Lending.ASKED, Lend): Lending.LENT,
    (Lending.ASKED, Decline): Lending.OVER,
    (Lending.ASKED, ReleasePages): Lending.ASKED,  # the planner has been asked, and its answer is still to come
    (Lending.LENT, Claim): Lending.LENT,
    (Lending.LENT, Fetch): Lending.LENT,
    (Lending.LENT, Acknowledge): Lending.RETURNING,
    (Lending.LENT, ReleasePages): Lending.RETURNING,
    (Lending.LENT, Lapsed): Lending.RETURNING,
    (Lending.RETURNING, Unread): Lending.OVER,
}


def diagram(table: dict[tuple[Borrowing, type], Borrowing] | dict[tuple[Lending, type], Lending]) -> str:
    """Return a table as a Mermaid state diagram."""
    rows = [(before.value, event.__name__, after.value) for (before, event), after in table.items()]
    first, ends = rows[0][0], {after for *_, after in rows} - {before for before, *_ in rows}
    lines = [f"    [*] --> {first}", *(f"    {before} --> {after}: {event}" for before, event, after in rows)]
    lines += [f"    {end} --> [*]" for end in sorted(ends)]
    return "\n".join(["stateDiagram-v2", *lines])
