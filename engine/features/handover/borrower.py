"""The side of a hand-over that wants pages, on one rank.

Owns: the transfers under way, and pages that have arrived and are not used yet.
Does not know: the pool, what a page holds, the network.
Whatever is lost is asked for again until the time of the transfer is over.  The planner gets one report of each
transfer, with the number of pages that have come without a gap; the prompt is computed from there on.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from engine.features.handover.desk import Desk, Timer
from engine.features.handover.messages import (
    Acknowledge,
    Borrow,
    Borrowed,
    CancelBorrow,
    Claim,
    Deny,
    Fetch,
    Grant,
    PageGroup,
    ReleasePages,
    digest_of,
)
from engine.features.handover.states import BORROWING, Borrowing, GroupsArrived, Lapsed, PagesLanded

WINDOW: Final = 4  # groups of one transfer that are on their way
RETRIES: Final = 10  # in the time of a transfer


@dataclass(slots=True, eq=False)
class BorrowedPages:
    """One transfer.  missing: groups in the order in which they are wanted.  groups: what has arrived, by number."""

    number: int
    claim: Claim
    lender: str
    num_pages: int
    state: Borrowing = Borrowing.CLAIMED
    group_pages: int = 1
    num_groups: int = 0
    groups: dict[int, bytes] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)


class Borrower:
    """The transfers of one rank.

    timeout_s: most seconds of a transfer.  most_bytes: of pages that are on their way or not used yet; num_bytes: the
    present number."""

    def __init__(self, desk: Desk, timeout_s: float, most_bytes: int) -> None:
        self._desk = desk
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._transfers: dict[int, BorrowedPages] = {}
        self._named: dict[bytes, BorrowedPages] = {}
        self.num_bytes = 0

    @property
    def num_transfers(self) -> int:
        """Number of transfers whose pages have not been used."""
        return len(self._transfers)

    # ---- from the planner -------------------------------------------------------------------

    def borrow(self, order: Borrow) -> None:
        """Begin a transfer."""
        desk = self._desk
        claim = msgspec.structs.replace(order.claim, sender=desk.address, model=desk.model)
        transfer = BorrowedPages(order.number, claim, order.peer, order.num_pages)
        self._transfers[order.number] = self._named[claim.name] = transfer
        self.num_bytes += self._reserved(transfer)
        if self.num_bytes > self._most_bytes:
            self._lapse(transfer)
            return
        transfer.timers = [
            desk.later(self._timeout_s, lambda: self._lapse(transfer)),
            *(desk.later(at * self._timeout_s / RETRIES, lambda: self._ask(transfer)) for at in range(1, RETRIES)),
        ]
        self._ask(transfer)

    def cancel(self, order: CancelBorrow) -> None:
        """Forget a transfer."""
        if (transfer := self._transfers.get(order.number)) is not None:
            if transfer.state in (Borrowing.CLAIMED, Borrowing.FETCHING):
                self._desk.send(transfer.lender, ReleasePages(name=transfer.claim.name), b"")
            self._moves(transfer, order)
            self._drop(transfer)

    def land(self, number: int, first: int, count: int) -> tuple[list[memoryview], bytes]:
        """Return pages that have arrived and the state behind the last one, and forget the transfer."""
        transfer = self._transfers[number]
        lands = self._moves(transfer, PagesLanded())
        assert lands, f"transfer {number} lands and is {transfer.state.value}"
        self._drop(transfer)
        size, per_group = self._desk.page_bytes, transfer.group_pages
        pages = []
        for page in range(first, first + count):
            group, at = divmod(page, per_group)
            pages.append(memoryview(transfer.groups[group])[at * size : (at + 1) * size])
        return pages, self._state_of(transfer)

    def _state_of(self, transfer: BorrowedPages) -> bytes:
        if not (size := self._desk.state_bytes):
            return b""
        first, at = divmod(transfer.num_pages, transfer.group_pages)
        end = b"".join(transfer.groups[group] for group in range(first, transfer.num_groups))
        at *= self._desk.page_bytes
        return end[at : at + size]

    # ---- from the lender --------------------------------------------------------------------

    def granted(self, grant: Grant) -> None:
        """Begin to fetch."""
        transfer = self._named.get(grant.name)
        if transfer is None or grant.group_pages < 1 or not self._moves(transfer, grant):
            return
        is_behind = grant.num_pages > transfer.num_pages  # a state behind more than what was asked for is of no use
        self.num_bytes -= self._reserved(transfer)
        transfer.num_pages = max(0, min(transfer.num_pages, grant.num_pages))
        self.num_bytes += self._reserved(transfer)
        transfer.group_pages = grant.group_pages
        is_useful = transfer.num_pages and not (self._desk.state_bytes and is_behind)
        group_bytes = grant.group_pages * self._desk.page_bytes
        transfer.num_groups = -(-self._reserved(transfer) // group_bytes) if is_useful else 0
        self._arrived(transfer) if not transfer.num_groups else self._ask(transfer)

    def denied(self, deny: Deny) -> None:
        """End a transfer with what has come."""
        if (transfer := self._named.get(deny.name)) is not None and self._moves(transfer, deny):
            self._end(transfer)

    def brought(self, group: PageGroup, payload: bytes) -> None:
        """Keep a group that has arrived whole, and ask for the next one."""
        transfer = self._named.get(group.name)
        if transfer is None or transfer.state is not Borrowing.FETCHING or group.group in transfer.groups:
            return
        if not 0 <= group.group < transfer.num_groups or len(payload) < self._size_of(transfer, group.group):
            return
        if digest_of(group.name, group.group, payload) != group.digest:
            return  # it is asked for again
        transfer.groups[group.group] = payload
        if len(transfer.groups) == transfer.num_groups:
            self._arrived(transfer)
        else:
            self._fetch(transfer, self._missing(transfer)[WINDOW - 1 : WINDOW])

    # ---- internals --------------------------------------------------------------------------

    def _moves(self, transfer: BorrowedPages, event: object) -> bool:
        """Take the transfer to its next state; return False if the event means nothing in this one."""
        after = BORROWING.get((transfer.state, type(event)))
        if after is None:
            return False
        transfer.state = after
        return True

    def _ask(self, transfer: BorrowedPages) -> None:
        """Send what has brought no answer so far."""
        if transfer.state is Borrowing.CLAIMED:
            self._desk.send(transfer.lender, transfer.claim, b"")
        elif transfer.state is Borrowing.FETCHING:
            self._fetch(transfer, self._missing(transfer)[:WINDOW])

    def _missing(self, transfer: BorrowedPages) -> list[int]:
        return [group for group in range(transfer.num_groups) if group not in transfer.groups]

    def _fetch(self, transfer: BorrowedPages, groups: list[int]) -> None:
        for group in groups:
            fetch = Fetch(name=transfer.claim.name, sender=self._desk.address, group=group)
            self._desk.send(transfer.lender, fetch, b"")

    def _size_of(self, transfer: BorrowedPages, group: int) -> int:
        group_bytes = transfer.group_pages * self._desk.page_bytes
        return min(group_bytes, self._reserved(transfer) - group * group_bytes)

    def _arrived(self, transfer: BorrowedPages) -> None:
        self._desk.send(transfer.lender, Acknowledge(name=transfer.claim.name), b"")
        if self._moves(transfer, GroupsArrived()):
            self._end(transfer)

    def _lapse(self, transfer: BorrowedPages) -> None:
        if self._moves(transfer, Lapsed()):
            self._desk.send(transfer.lender, ReleasePages(name=transfer.claim.name), b"")
            self._end(transfer)

    def _end(self, transfer: BorrowedPages) -> None:
        """Report the pages that have come without a gap; without the state behind them they are of no use."""
        self._cancel_timers(transfer)
        first_gap = next((group for group in range(transfer.num_groups) if group not in transfer.groups), None)
        num_pages = transfer.num_pages
        if first_gap is not None:
            num_pages = 0 if self._desk.state_bytes else first_gap * transfer.group_pages
        self._desk.report(Borrowed(number=transfer.number, num_pages=num_pages if transfer.num_groups else 0))

    def _reserved(self, transfer: BorrowedPages) -> int:
        return transfer.num_pages * self._desk.page_bytes + self._desk.state_bytes

    def _drop(self, transfer: BorrowedPages) -> None:
        self._cancel_timers(transfer)
        self.num_bytes -= self._reserved(transfer)
        del self._transfers[transfer.number], self._named[transfer.claim.name]

    def _cancel_timers(self, transfer: BorrowedPages) -> None:
        for timer in transfer.timers:
            timer.cancel()
        transfer.timers.clear()
