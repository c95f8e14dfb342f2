"""The messages of a hand-over: between two engines, between a planner and its ranks, and the part of a step.

Owns: their types and how each is encoded.  Does not know: when one is sent, what carries it.

    borrower ─Claim→ lender       the pages of a prompt are wanted; its tokens name them
    borrower ←Grant─ lender       so many are kept for it, for the length of a lease       or Deny
    borrower ─Fetch→ lender       one group of pages is wanted; the lease begins anew
    borrower ←PageGroup─ lender   the group, with a digest
    borrower ─Acknowledge→ lender all pages have arrived, and the lender may forget them   or ReleasePages

Every message between engines may be lost, doubled, late or overtaken.  ``name`` is a digest of the tokens and of the
request, so a message that comes too late fits no other transfer, and a page of the name has one possible content.
"""

import hashlib
from collections.abc import Callable
from typing import Final

import msgspec

from engine.messages import FeatureAnswer, FeatureRequest, Step

NAME: Final = "handover"
DIGEST_BYTES: Final = 16
FIRST_STATE: Final = 1 << 30  # numbers below it are those of states that a store brings


class _Note(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A message that travels as an array."""


# ---- between engines ------------------------------------------------------------------------


class Claim(_Note, frozen=True, kw_only=True):
    """A rank wants the pages of a prompt.  sender: where answers go.  model: digest of all that pages depend on.

    cache_salt, weights: of the request.  tokens: int32s of whole pages, from the prompt's beginning.
    first_page: pages before it are not wanted.  offer: the pages' offer; '' for any that the lender has."""

    name: bytes
    sender: str
    model: bytes
    cache_salt: str = ""
    weights: str = ""
    tokens: bytes = b""
    first_page: int = 0
    offer: str = ""


class Grant(_Note, frozen=True, kw_only=True):
    """The lender keeps so many pages, from the claim's first one on, in groups of the bytes of ``group_pages``.

    Behind the pages come the bytes of the state behind the last one, if the model has states."""

    name: bytes
    num_pages: int
    group_pages: int


class Deny(_Note, frozen=True, kw_only=True):
    """The lender has no such pages, or none any more."""

    name: bytes
    reason: str


class Fetch(_Note, frozen=True, kw_only=True):
    """A rank wants one group."""

    name: bytes
    sender: str
    group: int


class PageGroup(_Note, frozen=True, kw_only=True):
    """A group; its bytes follow the message.  digest: as ``digest_of``."""

    name: bytes
    group: int
    digest: bytes


class Acknowledge(_Note, frozen=True, kw_only=True):
    """All pages have arrived."""

    name: bytes


class ReleasePages(_Note, frozen=True, kw_only=True):
    """No more pages are wanted."""

    name: bytes


Wire = Claim | Grant | Deny | Fetch | PageGroup | Acknowledge | ReleasePages

# ---- planner -> its ranks -------------------------------------------------------------------


class Open(_Note, frozen=True, kw_only=True):
    """Listen for other engines."""


class Borrow(_Note, frozen=True, kw_only=True):
    """Get pages from a peer.  claim: without ``sender`` and ``model``, which each rank fills in."""

    number: int
    peer: str
    claim: Claim
    num_pages: int


class CancelBorrow(_Note, frozen=True, kw_only=True):
    """The pages of this number are not wanted any more."""

    number: int


class Lend(_Note, frozen=True, kw_only=True):
    """Keep these pages of the pool for a claim: int32[n].  slot: of the state behind them; -1 without states."""

    name: bytes
    pages: bytes
    slot: int = -1


class Decline(_Note, frozen=True, kw_only=True):
    """Deny a claim."""

    name: bytes
    reason: str


class KeepOffer(_Note, frozen=True, kw_only=True):
    """Report when the time of an offer is over."""

    offer: str


Order = Open | Borrow | CancelBorrow | Lend | Decline | KeepOffer

# ---- rank -> its planner --------------------------------------------------------------------


class Claimed(_Note, frozen=True, kw_only=True):
    """A claim has come."""

    claim: Claim


class Returned(_Note, frozen=True, kw_only=True):
    """This rank reads the pages of a loan no more."""

    name: bytes


class Borrowed(_Note, frozen=True, kw_only=True):
    """A rank has so many of the pages, and keeps them until a step uses them or ``CancelBorrow``."""

    number: int
    num_pages: int


class OfferOver(_Note, frozen=True, kw_only=True):
    """The time of an offer is over."""

    offer: str


Report = Claimed | Returned | Borrowed | OfferOver


class PagesLanding(_Note, frozen=True, kw_only=True):
    """Copy borrowed pages into pages of the pool.

    first: the first of the borrowed pages that is used; the rest is forgotten.  pages: int32[k].
    with_state: the state behind the last borrowed page arrives with them, under ``state_number``."""

    number: int
    first: int
    pages: bytes
    with_state: bool = False


_wire = msgspec.msgpack.Decoder(Wire)
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)
_landings = msgspec.msgpack.Decoder(tuple[PagesLanding, ...])


def frame_of(message: Wire) -> bytes:
    """Return a message between engines as bytes."""
    return msgspec.msgpack.encode(message)


def wire_of(frame: bytes) -> Wire:
    """Return the message of a frame.  Raises msgspec.MsgspecError."""
    message: Wire = _wire.decode(frame)
    return message


def order_message(number: int, order: Order) -> FeatureRequest:
    """Return an order as a message for every rank."""
    return FeatureRequest(feature=NAME, number=number, body=msgspec.msgpack.encode(order))


def order_of(message: FeatureRequest) -> Order:
    """Return the order of a message."""
    order: Order = _orders.decode(message.body)
    return order


def report_message(rank: int, report: Report) -> FeatureAnswer:
    """Return a rank's report as a message for its planner."""
    return FeatureAnswer(rank=rank, feature=NAME, number=0, body=msgspec.msgpack.encode(report))


def report_of(message: FeatureAnswer) -> Report:
    """Return the report of a message."""
    report: Report = _reports.decode(message.body)
    return report


def landings_part(landings: tuple[PagesLanding, ...]) -> dict[str, bytes]:
    """Return the parts of a step with these landings."""
    return {NAME: msgspec.msgpack.encode(landings)}


def landings_of(step: Step) -> tuple[PagesLanding, ...]:
    """Return the landings of a step."""
    return _landings.decode(part) if (part := step.parts.get(NAME)) is not None else ()


def state_number(number: int) -> int:
    """Return the number under which the state of a transfer arrives."""
    return FIRST_STATE + number


def name_of(request: str, number: int, claim: Claim) -> bytes:
    """Return the name of a transfer.  request: unlike that of any other request.  number: unlike others of it."""
    digest = hashlib.blake2b(claim.tokens, digest_size=DIGEST_BYTES)
    parts = (request, number, claim.cache_salt, claim.weights, claim.first_page)
    digest.update(msgspec.msgpack.encode(parts))
    return digest.digest()


def digest_of(name: bytes, group: int, payload: memoryview | bytes) -> bytes:
    """Return the digest by which a group is recognised as whole and as the right one."""
    digest = hashlib.blake2b(name + group.to_bytes(4, "little"), digest_size=DIGEST_BYTES)
    digest.update(payload)
    return digest.digest()


def answer_with_other_tokens(
    message: FeatureAnswer, tokens: Callable[[bytes], bytes], salt: Callable[[str], str]
) -> FeatureAnswer:
    """Return a rank's report as it is recorded: with other tokens, and another salt."""
    report = report_of(message)
    if not isinstance(report, Claimed):
        return message
    claim = report.claim
    claim = msgspec.structs.replace(claim, tokens=tokens(claim.tokens), cache_salt=salt(claim.cache_salt))
    return report_message(message.rank, Claimed(claim=claim))


def without_content(body: bytes) -> bytes:
    """Return an order without what follows from the values of tokens."""
    order = _orders.decode(body)
    return type(order).__name__.encode() + (order.pages if isinstance(order, Lend) else b"")


def sentence(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message in words."""
    content = order_of(message) if isinstance(message, FeatureRequest) else report_of(message)
    told = content.claim if isinstance(content, Claimed | Borrow) else content
    name = told.name.hex()[:8] if isinstance(told, Claim | Lend | Decline | Returned) else ""
    return f"{type(content).__name__} {name}".rstrip()
