"""The side of a hand-over that has the pages, on one rank.

Owns: the leases, and which pages each of them covers.
Does not know: the pool, the radix tree, the network.
The planner keeps the pages of a loan until every rank has returned it.  A rank returns it when the lease is over, for
whatever reason, and no page is being read for it any more.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from engine.features.handover.desk import Desk, Timer, WantedBytes
from engine.features.handover.messages import (
    Acknowledge,
    Claim,
    Claimed,
    Decline,
    Deny,
    Fetch,
    Grant,
    KeepOffer,
    Lend,
    OfferOver,
    PageGroup,
    ReleasePages,
    Returned,
    digest_of,
)
from engine.features.handover.states import LENDING, Lapsed, Lending, Unread

PAGE_INDEX_BYTES: Final = 4
MOST_ASKED: Final = 64  # claims that wait for the planner
MOST_REMEMBERED: Final = 4096  # transfers that are over, whose claims may come once more
MOST_READS: Final = 4  # of one loan at a time; what is wanted beyond that is wanted again


@dataclass(slots=True, eq=False)
class Loan:
    """One transfer.  borrower: where answers go; '' until a claim has come.  pages: int32s of the pool.

    slot: of the state behind them; -1 for none."""

    state: Lending
    borrower: str = ""
    pages: bytes = b""
    slot: int = -1
    num_reads: int = 0
    timer: Timer | None = None


class Lender:
    """The leases of one rank.  lease_s: how long one lasts after the last message of its borrower."""

    def __init__(self, desk: Desk, lease_s: float, group_bytes: int) -> None:
        self._desk = desk
        self._lease_s = lease_s
        self._group_pages = max(1, group_bytes // desk.page_bytes)
        self._loans: dict[bytes, Loan] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_loans(self) -> int:
        """Number of transfers that are not over."""
        return len(self._loans)

    # ---- from the planner -------------------------------------------------------------------

    def lend(self, order: Lend) -> None:
        """Begin a lease.  The claim of this rank may have come before it, or comes later."""
        loan = self._loans.setdefault(order.name, Loan(Lending.ASKED))
        if self._moves(loan, order):
            loan.pages, loan.slot = order.pages, order.slot
            self._renew(order.name, loan)
            self._grant(order.name, loan)

    def decline(self, order: Decline) -> None:
        """Deny a claim."""
        loan = self._loans.get(order.name)
        if loan is not None and self._moves(loan, order):
            self._forget(order.name)
            self._deny(order.name, loan.borrower, order.reason)

    def keep_offer(self, order: KeepOffer) -> None:
        """Report the end of an offer when its time is over."""
        self._desk.later(self._lease_s, lambda: self._desk.report(OfferOver(offer=order.offer)))

    # ---- from the borrower ------------------------------------------------------------------

    def claimed(self, claim: Claim) -> None:
        """Ask the planner for pages, once for each name; repeat the answer to a claim that comes again."""
        loan = self._loans.get(claim.name)
        if claim.model != self._desk.model:
            self._deny(claim.name, claim.sender, "another model, or another format of pages")
        elif loan is not None:
            loan.borrower = claim.sender
            if self._moves(loan, claim):
                self._renew(claim.name, loan)
                self._grant(claim.name, loan)
        elif claim.name in self._over or self._num_asked() >= MOST_ASKED:
            self._deny(claim.name, claim.sender, "the lease is over" if claim.name in self._over else "too many claims")
        else:
            self._loans[claim.name] = Loan(Lending.ASKED, claim.sender)
            self._desk.report(Claimed(claim=claim))

    def fetched(self, fetch: Fetch) -> None:
        """Read a group of pages and send it."""
        loan = self._loans.get(fetch.name)
        if loan is None:
            self._deny(fetch.name, fetch.sender, "the lease is over")
            return
        wanted = self._wanted(loan, fetch.group) if fetch.group >= 0 else None
        if not self._moves(loan, fetch) or wanted is None or loan.num_reads >= MOST_READS:
            return
        loan.borrower = fetch.sender
        self._renew(fetch.name, loan)
        loan.num_reads += 1
        self._desk.read(wanted, lambda content: self._read(fetch, loan, content))

    def _wanted(self, loan: Loan, group: int) -> WantedBytes | None:
        """Return what a group has; None if there is no such group."""
        size, page_bytes = self._group_pages * PAGE_INDEX_BYTES, self._desk.page_bytes
        pages = loan.pages[group * size : (group + 1) * size]
        state_bytes = self._desk.state_bytes if loan.slot >= 0 else 0
        before = len(loan.pages) // PAGE_INDEX_BYTES * page_bytes  # of the state
        first, end = (
            min(max(0, at * self._group_pages * page_bytes - before), state_bytes) for at in (group, group + 1)
        )
        return WantedBytes(pages, loan.slot, first, end) if pages or end > first else None

    def _read(self, fetch: Fetch, loan: Loan, content: bytes) -> None:
        loan.num_reads -= 1
        if loan.state is Lending.LENT and content:
            digest = digest_of(fetch.name, fetch.group, content)
            self._desk.send(loan.borrower, PageGroup(name=fetch.name, group=fetch.group, digest=digest), content)
        self._settle(fetch.name, loan)

    def returned(self, message: Acknowledge | ReleasePages) -> None:
        """End a lease."""
        loan = self._loans.get(message.name)
        if loan is not None and self._moves(loan, message):
            self._settle(message.name, loan)

    # ---- internals --------------------------------------------------------------------------

    def _moves(self, loan: Loan, event: object) -> bool:
        """Take the loan to its next state; return False if the event means nothing in this one."""
        after = LENDING.get((loan.state, type(event)))
        if after is None:
            return False
        loan.state = after
        return True

    def _num_asked(self) -> int:
        return sum(loan.state is Lending.ASKED for loan in self._loans.values())

    def _grant(self, name: bytes, loan: Loan) -> None:
        if loan.borrower:
            num_pages = len(loan.pages) // PAGE_INDEX_BYTES
            self._desk.send(loan.borrower, Grant(name=name, num_pages=num_pages, group_pages=self._group_pages), b"")

    def _deny(self, name: bytes, borrower: str, reason: str) -> None:
        self._desk.send(borrower, Deny(name=name, reason=reason), b"")

    def _renew(self, name: bytes, loan: Loan) -> None:
        if loan.timer is not None:
            loan.timer.cancel()
        loan.timer = self._desk.later(self._lease_s, lambda: self._lapse(name, loan))

    def _lapse(self, name: bytes, loan: Loan) -> None:
        if self._loans.get(name) is loan and self._moves(loan, Lapsed()):
            self._settle(name, loan)

    def _settle(self, name: bytes, loan: Loan) -> None:
        """Return the pages if the lease is over and nothing reads them."""
        if loan.state is Lending.RETURNING and not loan.num_reads and self._moves(loan, Unread()):
            if loan.timer is not None:
                loan.timer.cancel()
            self._forget(name)
            self._desk.report(Returned(name=name))

    def _forget(self, name: bytes) -> None:
        del self._loans[name]
        self._over[name] = None
        if len(self._over) > MOST_REMEMBERED:
            self._over.popitem(last=False)
