"""Planted bugs of hand-overs between engines: each must be found by the simulation of split engines.

Owns: the bugs.  Does not know: how they are found.
"""

from typing import Any

import msgspec

import engine.features.handover.borrower as borrower_module
from engine.features.handover.borrower import BorrowedPages, Borrower
from engine.features.handover.lender import Lender, Loan
from engine.features.handover.messages import (
    Acknowledge,
    Borrowed,
    Claim,
    Claimed,
    Grant,
    Lend,
    PageGroup,
    ReleasePages,
    Returned,
    order_message,
)
from engine.features.handover.planner import HandoverPlanner
from engine.features.handover.states import Borrowing, Lending
from engine.features.states.tree import StateTree
from engine.kv.node import Handle, Namespace
from engine.kv.pages import Pages
from engine.scheduling.rows import Sequence
from server.extensions.chaos.sim.mutants import Method, instead_of, made_from

# ---- the side that wants pages ------------------------------------------------------------------


@instead_of(Borrower, "granted")
def pages_are_acknowledged_before_they_have_come(granted: Method, self: Borrower, grant: Grant) -> None:
    granted(self, grant)
    if (transfer := self._named.get(grant.name)) is not None:
        self._desk.send(transfer.lender, Acknowledge(name=grant.name), b"")


@instead_of(Borrower, "_arrived")
def nothing_is_acknowledged(arrived: Method, self: Borrower, transfer: BorrowedPages) -> None:
    lender, transfer.lender = transfer.lender, "p0.9"
    arrived(self, transfer)
    transfer.lender = lender


@instead_of(Borrower, "brought")
def the_last_group_counts_as_all(brought: Method, self: Borrower, group: PageGroup, payload: bytes) -> None:
    transfer = self._named.get(group.name)
    brought(self, group, payload)
    if transfer is not None and group.group == transfer.num_groups - 1 and transfer.state is Borrowing.FETCHING:
        for number in range(transfer.num_groups):
            transfer.groups.setdefault(number, payload + bytes(self._size_of(transfer, 0)))
        self._arrived(transfer)


@made_from(borrower_module, "digest_of")
def a_damaged_group_is_kept(_: Method) -> Method:
    return lambda name, group, payload: _Anything()


class _Anything:
    """It equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@instead_of(Borrower, "brought")
def groups_are_kept_in_the_order_of_their_arrival(
    brought: Method, self: Borrower, group: PageGroup, payload: bytes
) -> None:
    transfer = self._named.get(group.name)
    known = set() if transfer is None else set(transfer.groups)
    brought(self, group, payload)
    if transfer is not None and len(transfer.groups) == len(known) + 1:
        (new,) = transfer.groups.keys() - known
        if len(payload) == self._size_of(transfer, 0):
            transfer.groups[len(known)] = transfer.groups.pop(new)


@instead_of(Borrower, "_end")
def gaps_count_as_pages(end: Method, self: Borrower, transfer: BorrowedPages) -> None:
    transfer.groups = dict(enumerate(transfer.groups.values()))
    end(self, transfer)


@made_from(Borrower, "_lapse")
def a_transfer_has_no_end(lapse: Method) -> Method:
    return lambda self, transfer: None


@instead_of(Borrower, "_ask")
def what_is_lost_is_not_wanted_again(_: Method, self: Borrower, transfer: BorrowedPages) -> None:
    if transfer.state is Borrowing.CLAIMED and not transfer.groups and transfer.number not in _asked(self):
        _asked(self).add(transfer.number)
        self._desk.send(transfer.lender, transfer.claim, b"")
    elif transfer.state is Borrowing.FETCHING and -transfer.number - 1 not in _asked(self):
        _asked(self).add(-transfer.number - 1)
        self._fetch(transfer, self._missing(transfer)[:1])


def _asked(self: Any) -> set[int]:
    found: set[int] = self.__dict__.setdefault("asked_once", set())
    return found


@instead_of(Borrower, "denied")
def a_transfer_is_reported_twice(denied: Method, self: Borrower, deny: Any) -> None:
    denied(self, deny)
    if (transfer := self._named.get(deny.name)) is not None:
        self._desk.report(Borrowed(number=transfer.number, num_pages=0))


@made_from(Borrower, "cancel")
def a_cancelled_transfer_keeps_its_pages(cancel: Method) -> Method:
    return lambda self, order: None


@made_from(Borrower, "land")
def the_wrong_pages_land(land: Method) -> Method:
    return lambda self, number, first, count: land(self, number, 0, count)


@instead_of(Borrower, "_drop")
def bytes_of_a_transfer_are_counted_for_ever(drop: Method, self: Borrower, transfer: BorrowedPages) -> None:
    before = self.num_bytes
    drop(self, transfer)
    self.num_bytes = before


# ---- the side that has them ---------------------------------------------------------------------


@made_from(Lender, "_lapse")
def a_lease_never_ends(lapse: Method) -> Method:
    return lambda self, name, loan: None


@made_from(Lender, "keep_offer")
def an_offer_never_ends(keep: Method) -> Method:
    return lambda self, order: None


@instead_of(Lender, "returned")
def a_loan_is_returned_twice(returned: Method, self: Lender, message: Acknowledge | ReleasePages) -> None:
    known = message.name in self._loans
    returned(self, message)
    if known and message.name not in self._loans:
        self._desk.report(Returned(name=message.name))


@instead_of(Lender, "_settle")
def a_loan_is_returned_while_it_is_read(settle: Method, self: Lender, name: bytes, loan: Loan) -> None:
    if loan.state is Lending.RETURNING and loan.num_reads:
        self._desk.report(Returned(name=name))
    settle(self, name, loan)


@instead_of(Lender, "claimed")
def a_claim_that_comes_again_is_another_one(claimed: Method, self: Lender, claim: Claim) -> None:
    if (loan := self._loans.get(claim.name)) is not None and loan.state is Lending.ASKED:
        self._desk.report(Claimed(claim=claim))
    else:
        claimed(self, claim)


@instead_of(Lender, "claimed")
def a_claim_is_taken_after_its_end(claimed: Method, self: Lender, claim: Claim) -> None:
    self._over.pop(claim.name, None)
    claimed(self, claim)


@made_from(Lender, "fetched")
def the_first_group_is_sent_for_all(fetched: Method) -> Method:
    return lambda self, fetch: fetched(self, msgspec.structs.replace(fetch, group=0))


# ---- the planner --------------------------------------------------------------------------------


@instead_of(HandoverPlanner, "_returned")
def one_rank_returns_a_loan_for_all(returned: Method, self: HandoverPlanner, name: bytes) -> None:
    if (loan := self._loans.get(name)) is not None:
        loan.num_unreturned = 1
    returned(self, name)


@instead_of(HandoverPlanner, "_borrowed")
def one_rank_speaks_for_all(borrowed: Method, self: HandoverPlanner, number: int, num_pages: int) -> None:
    if (loaned := self._waiting.get(number)) is not None:
        loaned.num_unanswered = 1
    borrowed(self, number, num_pages)


@instead_of(HandoverPlanner, "_borrowed")
def the_most_pages_of_a_rank_count(borrowed: Method, self: HandoverPlanner, number: int, num_pages: int) -> None:
    loaned = self._waiting.get(number)
    before = None if loaned is None or loaned.num_unanswered == self._parts.limits.num_ranks else loaned.num_pages
    borrowed(self, number, num_pages)
    if loaned is not None and before is not None:
        loaned.num_pages = max(before, num_pages)


@instead_of(HandoverPlanner, "reset")
def loans_outlive_their_executors(reset: Method, self: HandoverPlanner) -> list[Sequence]:
    loans, num_kept = dict(self._loans), self._pages.num_kept
    sequences: list[Sequence] = reset(self)
    self._loans.update(loans)
    self._pages.num_kept = num_kept if loans else self._pages.num_kept
    return sequences


@instead_of(HandoverPlanner, "reset")
def sequences_that_wait_are_lost_with_the_executors(reset: Method, self: HandoverPlanner) -> list[Sequence]:
    reset(self)
    return []


@instead_of(HandoverPlanner, "_claimed")
def an_offer_stays_locked_when_it_is_claimed(drop: Method, self: HandoverPlanner, claim: Claim) -> None:
    handle = self._offers.get(claim.offer)
    if handle is not None:
        self._offers[claim.offer] = self._keep(self._tree.match(claim.tokens, Namespace(claim.cache_salt)))
    drop(self, claim)


@instead_of(HandoverPlanner, "forget")
def a_sequence_that_leaves_keeps_its_transfer(forget: Method, self: HandoverPlanner, sequence: Sequence) -> bool:
    num_before = len(self._requested)
    held: bool = forget(self, sequence)
    del self._requested[num_before:]
    return held


@made_from(HandoverPlanner, "_may_lend")
def any_number_of_pages_is_lent(_: Method) -> Method:
    return lambda self, num_pages: True


@made_from(HandoverPlanner, "has_room")
def a_row_begins_without_room_beside_loans(_: Method) -> Method:
    return lambda self, sequence: True


@instead_of(HandoverPlanner, "adopt")
def one_page_too_many_is_adopted(
    adopt: Method, self: HandoverPlanner, sequence: Sequence, handle: Handle, key: bytes, pages: Pages
) -> None:
    if (loaned := self._answered.get(sequence.request_id)) is not None and loaned.num_pages:
        loaned.num_pages = min(loaned.num_pages + 1, len(key) // self._tree.page_bytes - loaned.first_page)
    adopt(self, sequence, handle, key, pages)


@instead_of(HandoverPlanner, "_claimed")
def pages_of_another_prompt_are_lent(match: Method, self: HandoverPlanner, claim: Claim) -> None:
    others = [loan.handle for loan in self._loans.values()]
    match(self, claim)
    loan = self._loans.get(claim.name)
    if others and loan is not None and others[0].node is not None:
        pages = self._tree.pages(others[0])[: loan.handle.num_pages]
        self._requested[-1] = order_message(0, Lend(name=claim.name, pages=pages.tobytes()))


# ---- states -------------------------------------------------------------------------------------


@instead_of(Borrower, "_end")
def pages_count_without_their_state(end: Method, self: Borrower, transfer: BorrowedPages) -> None:
    if self._desk.state_bytes and transfer.groups:
        for group in range(transfer.num_groups):
            transfer.groups.setdefault(group, bytes(self._size_of(transfer, group)))
    end(self, transfer)


@instead_of(StateTree, "slot_of")
def the_state_of_another_slot_is_lent(match: Method, self: StateTree, handle: Handle) -> int:
    others = [slot for slot in self._snapshots.values() if slot != match(self, handle)]
    return others[0] if others and handle.node in self._lent else match(self, handle)
