"""Both sides of hand-overs on one rank, and which of them a message is for.

Owns: the dispatch.  Does not know: what a side does with a message.
"""

from collections.abc import Callable

import msgspec

from engine.features.handover.borrower import Borrower
from engine.features.handover.lender import Lender
from engine.features.handover.messages import (
    Acknowledge,
    Borrow,
    CancelBorrow,
    Claim,
    Decline,
    Deny,
    Fetch,
    Grant,
    KeepOffer,
    Lend,
    Open,
    Order,
    PageGroup,
    ReleasePages,
    Wire,
)


class Sides:
    """A lender and a borrower.  find: returns a peer's address by its name; '' for one that is not known."""

    def __init__(self, lender: Lender, borrower: Borrower, find: Callable[[str], str]) -> None:
        self.lender = lender
        self.borrower = borrower
        self._find = find

    def take(self, order: Order) -> None:
        """Take an order of the planner."""
        match order:
            case Borrow():
                self.borrower.borrow(msgspec.structs.replace(order, peer=self._find(order.peer)))
            case CancelBorrow():
                self.borrower.cancel(order)
            case Lend():
                self.lender.lend(order)
            case Decline():
                self.lender.decline(order)
            case KeepOffer():
                self.lender.keep_offer(order)
            case Open():
                pass

    def receive(self, message: Wire, payload: bytes) -> None:
        """Take a message of another engine."""
        match message:
            case Claim():
                self.lender.claimed(message)
            case Fetch():
                self.lender.fetched(message)
            case Acknowledge() | ReleasePages():
                self.lender.returned(message)
            case Grant():
                self.borrower.granted(message)
            case Deny():
                self.borrower.denied(message)
            case PageGroup():
                self.borrower.brought(message, payload)
