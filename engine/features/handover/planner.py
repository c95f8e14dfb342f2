"""Hand-overs in the planner: pages of this engine that others copy, and pages that come from others.

Owns: the locks on lent pages, sequences that wait for pages of another engine, where these pages land.
Does not know: the network, time, how a page is copied.

Pages are lent from the radix tree, where a lock keeps them as it keeps those of a running row, and nothing writes to
them.  Pages that a step in flight still fills from elsewhere are in the tree too: a claim for them waits.  A loan ends
when every rank has returned it.  An offer is a lock without a loan: nothing reads its pages, so it ends at once where a
sequence needs the room.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

import msgspec
import numpy as np

from engine.features.handover.messages import (
    NAME,
    Borrow,
    Borrowed,
    CancelBorrow,
    Claim,
    Claimed,
    Decline,
    KeepOffer,
    Lend,
    OfferOver,
    Open,
    Order,
    PagesLanding,
    Returned,
    landings_part,
    name_of,
    order_message,
    report_of,
    state_number,
)
from engine.features.handover.terms import terms_of
from engine.features.handover.wish import Wish, wish_of
from engine.kv.match import Match
from engine.kv.node import Handle, Namespace
from engine.kv.pages import Pages
from engine.kv.radix import TOKEN_BYTES, RadixTree
from engine.messages import Admit, FeatureAnswer, FeatureRequest
from engine.plugins.features import FeatureContext
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import WORTH_WAITING_TOKENS, Sequence
from engine.scheduling.step_builder import InFlight, StepBuilder

MOST_WAITING: Final = 32  # sequences that wait for pages of other engines
MOST_OFFERS: Final = 256


@runtime_checkable
class TreeOfStates(Protocol):
    """A tree that has states behind pages, each in a slot.  num_to_take: states that may arrive.

    may_lend: whether one more may be lent."""

    @property
    def num_to_take(self) -> int: ...
    @property
    def may_lend(self) -> bool: ...

    def match_here(self, key: bytes, namespace: Namespace) -> Match:
        """Find the longest prefix that is on the device and has a state."""
        ...

    def slot_of(self, handle: Handle) -> int:
        """Return the slot of the state at a handle's end."""
        ...

    def lend_state(self, handle: Handle) -> None:
        """Keep the state at a handle's end."""
        ...

    def take_back(self, handle: Handle) -> None:
        """End a ``lend_state``."""
        ...

    def has_arrived(self, handle: Handle) -> bool:
        """Return whether the state at a handle's end is in its slot."""
        ...

    def arrive(self, handle: Handle, number: int) -> None:
        """Keep a state that arrives with the next step at a handle's end.  number: of what brings it."""
        ...


@dataclass(slots=True)
class LentPages:
    """Pages that another engine copies.  num_unreturned: ranks that may still read them."""

    handle: Handle
    num_unreturned: int


@dataclass(slots=True)
class Arrival:
    """Pages on their way to a sequence.

    num_pages: that all ranks have which have answered, from page ``first_page`` of the prompt on."""

    number: int
    sequence: Sequence
    first_page: int
    num_pages: int
    num_unanswered: int


class HandoverPlanner(PlannerFeature):
    """The hand-overs of one planner.  lent_share: most of the pool's pages that are kept for others."""

    order = 95  # a sequence has the names of its weights by then

    def __init__(self, parts: PlannerParts, lent_share: float) -> None:
        self._parts = parts
        self._pages = parts.pages
        self._most_lent = int(lent_share * parts.limits.num_pages)
        self._loans: dict[bytes, LentPages] = {}
        self._offers: dict[str, Handle] = {}
        self._waiting: dict[int, Arrival] = {}  # by number
        self._answered: dict[int, Arrival] = {}  # by request
        self._landings: list[PagesLanding] = []
        self._filling: deque[Pages] = deque()  # by steps in flight, which bring them from hosts, stores and engines
        self._early: list[Claim] = []  # for some of these
        self._requested: list[FeatureRequest] = []
        self._num_requested = 0
        self._is_open = False
        self._crowded = -1  # the request that lent pages have kept from its start

    # ---- requests ---------------------------------------------------------------------------

    def admit(self, sequence: Sequence, message: Admit) -> None:
        """Note what the request has to do with other engines."""
        if (wish := wish_of(message.parts)) == Wish():
            return
        sequence.notes[NAME] = wish
        if wish.offer:
            sequence.max_total = min(sequence.max_total, len(sequence.tokens) + 1)

    def hold(self, sequence: Sequence) -> Why | None:
        """Request the pages of a sequence's prefix that the cache lacks, once."""
        wish: Wish | None = sequence.notes.get(NAME)
        if wish is None or not wish.peer or sequence.request_id in self._answered:
            return None
        del sequence.notes[NAME]
        match = self._pages.match(sequence)
        num_pages = len(match.key) // self._tree.page_bytes - match.num_cached
        if num_pages * self._parts.limits.page_size < WORTH_WAITING_TOKENS or len(self._waiting) >= MOST_WAITING:
            return None
        claim = Claim(
            name=b"",
            sender="",
            model=b"",
            cache_salt=match.namespace.cache_salt,
            weights=match.namespace.adapter,
            tokens=match.key,
            first_page=match.num_cached,
            offer=wish.claim,
        )
        number = self._order_borrow(wish, claim, num_pages)
        self._waiting[number] = Arrival(number, sequence, match.num_cached, num_pages, self._parts.limits.num_ranks)
        return "fetch"

    def _order_borrow(self, wish: Wish, claim: Claim, num_pages: int) -> int:
        number = self._num_requested
        name = name_of(wish.id, number, claim)
        claim = msgspec.structs.replace(claim, name=name)
        self._order(Borrow(number=number, peer=wish.peer, claim=claim, num_pages=num_pages))
        return number

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        """Let the tree adopt the pages that have come, as far as they continue what the handle keeps."""
        if (loaned := self._answered.pop(sequence.request_id, None)) is None:
            return
        first, end = handle.num_pages, loaned.first_page + loaned.num_pages
        if not loaned.first_page <= first < end:
            self._order(CancelBorrow(number=loaned.number))
            return
        tree, states = self._tree, self._states
        if states is not None and not states.num_to_take:
            self._order(CancelBorrow(number=loaned.number))
            return
        pages = pages[: end - first]
        # A store copies what is new out before the content of a step comes in, so it cannot have these.
        noted = tree.new_pages, tree.new_state
        tree.new_pages = tree.new_state = None
        end_of_key = (first + len(pages)) * tree.page_bytes
        published = tree.publish(handle, key[:end_of_key], np.concatenate((tree.pages(handle), pages)))
        num_here = len(published.pages)  # the tree may have pages behind its last state
        pages[:num_here] = published.pages
        self._pages.allocator.free(published.duplicates)
        if states is not None:
            states.arrive(handle, state_number(loaned.number))
        tree.new_pages, tree.new_state = noted
        self._landings.append(
            PagesLanding(
                number=loaned.number,
                first=first - loaned.first_page + num_here,
                pages=pages[num_here:].tobytes(),
                with_state=states is not None,
            )
        )

    def attach(self, step: StepBuilder) -> None:
        """Add the landings since the last step, and note all pages that it fills."""
        if self._landings:
            step.parts |= landings_part(tuple(self._landings))
            step.filled_pages += [one.pages for one in self._landings]
            step.num_copied += sum(len(one.pages) for one in self._landings) // TOKEN_BYTES
            self._landings = []
        if step.filled_pages:
            self._filling.append(np.frombuffer(b"".join(step.filled_pages), dtype=np.int32))
            step.notes[NAME] = True

    def completed(self, record: InFlight, seconds: float) -> None:
        """Answer the claims for pages that are filled now."""
        if NAME in record.notes:
            self._filling.popleft()
        early, self._early = self._early, []
        for claim in early:
            self._claimed(claim)

    def ended(self, sequence: Sequence) -> None:
        """Keep the prompt's pages for the engine that they are offered to."""
        wish: Wish | None = sequence.notes.get(NAME)
        if sequence.request_id == self._crowded:
            self._crowded = -1
        if wish is None or not wish.offer or wish.offer in self._offers or len(self._offers) >= MOST_OFFERS:
            return
        whole = self._pages.match(sequence)
        match = self._match(whole.key, whole.namespace)
        if match.num_pages and self._may_lend(match.num_pages):
            self._offers[wish.offer] = self._keep(match)
            self._order(KeepOffer(offer=wish.offer))

    def forget(self, sequence: Sequence) -> bool:
        if (loaned := self._answered.pop(sequence.request_id, None)) is not None:
            self._order(CancelBorrow(number=loaned.number))
        for loaned in self._waiting.values():
            if loaned.sequence is sequence:
                del self._waiting[loaned.number]
                self._order(CancelBorrow(number=loaned.number))
                return True
        return False

    def num_held(self) -> int:
        """Return the number of sequences that wait for pages."""
        return len(self._waiting)

    # ---- room -------------------------------------------------------------------------------

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether a sequence fits beside what is lent; offers make room for it."""
        most = self._parts.limits.num_pages - self._most_pages(sequence)
        for offer in list(self._offers):
            if self.num_lent <= most:
                break
            self._drop(self._offers.pop(offer))
        if self.num_lent <= most:
            return True
        self._crowded = sequence.request_id
        return False

    def started(self, sequence: Sequence) -> None:
        if sequence.request_id == self._crowded:
            self._crowded = -1

    @property
    def num_lent(self) -> int:
        """Number of pages that are kept for other engines; one that several keep counts for each."""
        handles = [*self._offers.values(), *(loan.handle for loan in self._loans.values())]
        return sum(handle.num_pages for handle in handles)

    def _may_lend(self, num_pages: int) -> bool:
        """Return whether so many more pages may be lent: each running sequence must fit the pool without them."""
        running = (one for one in self._parts.table.sequences if one is not None)
        largest = max((self._most_pages(one) for one in running), default=0)
        most = min(self._most_lent, self._parts.limits.num_pages - largest)
        is_kept = self._states is None or self._states.may_lend
        return self._crowded < 0 and is_kept and self.num_lent + num_pages <= most

    def _most_pages(self, sequence: Sequence) -> int:
        return -(-(sequence.max_total - 1) // self._parts.limits.page_size)

    @property
    def _tree(self) -> RadixTree:
        return self._pages.tree

    @property
    def _states(self) -> TreeOfStates | None:
        """The tree, if it has states."""
        return self._tree if isinstance(self._tree, TreeOfStates) else None

    def _match(self, key: bytes, namespace: Namespace) -> Match:
        """Return what may be lent of a key: pages on the device, and the state behind them if there are states."""
        states = self._states
        return self._tree.match(key, namespace) if states is None else states.match_here(key, namespace)

    def _keep(self, match: Match) -> Handle:
        self._pages.num_kept += 1
        handle = self._tree.lock(match)
        if self._states is not None:
            self._states.lend_state(handle)
        return handle

    def _drop(self, handle: Handle) -> None:
        self._pages.num_kept -= 1
        if self._states is not None:
            self._states.take_back(handle)
        self._tree.unlock(handle)
        self._parts.prefills.unblock()

    # ---- messages ---------------------------------------------------------------------------

    def waits(self, num_in_flight: int) -> bool:
        """Open the ranks: it is called when they are there."""
        if not self._is_open:
            self._is_open = True
            self._order(Open())
        return False

    def _order(self, order: Order) -> None:
        self._num_requested += 1
        self._requested.append(order_message(self._num_requested, order))

    def outgoing(self) -> list[FeatureRequest]:
        requested, self._requested = self._requested, []
        return requested

    def received(self, message: FeatureAnswer) -> None:
        """Take a rank's report."""
        if message.feature != NAME:
            return
        match report_of(message):
            case Claimed(claim=claim):
                self._claimed(claim)
            case Returned(name=name):
                self._returned(name)
            case Borrowed(number=number, num_pages=num_pages):
                self._borrowed(number, num_pages)
            case OfferOver(offer=offer):
                if (handle := self._offers.pop(offer, None)) is not None:
                    self._drop(handle)

    def _claimed(self, claim: Claim) -> None:
        """Lend what the cache has of a prompt.  Every rank reports a claim; the first report counts."""
        if claim.name in self._loans or any(claim.name == one.name for one in self._early):
            return
        page_bytes = self._tree.page_bytes
        match = self._match(
            claim.tokens[: len(claim.tokens) // page_bytes * page_bytes], Namespace(claim.cache_salt, claim.weights)
        )
        if (offered := self._offers.pop(claim.offer, None)) is not None:
            self._drop(offered)  # the loan takes its place
        num_pages = match.num_pages - claim.first_page
        if claim.first_page < 0 or num_pages <= 0 or not self._may_lend(match.num_pages):
            reason = "no page of the prompt is cached" if num_pages <= 0 else "too many pages are lent"
            self._order(Decline(name=claim.name, reason=reason))
            return
        handle = self._keep(match)
        pages = self._tree.pages(handle)[claim.first_page :]
        states = self._states
        has_arrived = states is None or states.has_arrived(handle)
        if not has_arrived or any(np.isin(pages, filling).any() for filling in self._filling):
            self._drop(handle)
            self._early.append(claim)
            return
        self._loans[claim.name] = LentPages(handle, self._parts.limits.num_ranks)
        slot = -1 if states is None else states.slot_of(handle)
        self._order(Lend(name=claim.name, pages=pages.tobytes(), slot=slot))

    def _returned(self, name: bytes) -> None:
        if (loan := self._loans.get(name)) is not None:
            loan.num_unreturned -= 1
            if not loan.num_unreturned:
                del self._loans[name]
                self._drop(loan.handle)

    def _borrowed(self, number: int, num_pages: int) -> None:
        """Take one rank's number of pages.  The last one gives the sequence back to the queue."""
        if (loaned := self._waiting.get(number)) is None:
            return
        loaned.num_pages = min(loaned.num_pages, num_pages)
        loaned.num_unanswered -= 1
        if not loaned.num_unanswered:
            del self._waiting[number]
            self._answered[loaned.sequence.request_id] = loaned
            self._parts.prefills.wait(loaned.sequence)

    def reset(self) -> list[Sequence]:
        """Forget all transfers: the pages are lost, and so are the ranks that read them."""
        sequences = [loaned.sequence for loaned in self._waiting.values()]
        self._pages.num_kept -= len(self._loans) + len(self._offers)
        for held in (self._loans, self._offers, self._waiting, self._answered, self._landings, self._requested):
            held.clear()
        self._filling.clear()
        self._early.clear()
        self._is_open, self._crowded = False, -1
        return sequences

    def gauges(self) -> dict[str, int]:
        return {"lent_pages": self.num_lent, "borrowing": len(self._waiting) + len(self._answered)}


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None if no transfer is configured."""
    options = terms_of(context.config)
    return None if options is None else partial(HandoverPlanner, lent_share=options.lent_share)
