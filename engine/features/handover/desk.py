"""The rank as both sides of a hand-over see it.

Owns: its protocol.  Does not know: sockets, clocks, tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.features.handover.messages import Report, Wire


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None:
        """Forget the call."""
        ...


@dataclass(frozen=True, slots=True)
class WantedBytes:
    """The content of a group: whole pages, int32s, and then the bytes ``first`` to ``end`` of the state in a slot."""

    pages: bytes
    slot: int = -1
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """The rank of a lender and a borrower; all calls are made on one thread.

    address: where answers to this rank go.  model: digest of all that the bytes of a page depend on.
    page_bytes: size of a page on this rank.  state_bytes: size of a state; 0 for a model without states.
    send: passes a message, and bytes after it, to an address; it may be lost.  report: passes a report to the planner.
    later: calls back after so many seconds.  read: copies out what is wanted, and calls back with the bytes; with
    none if they cannot be had."""

    address: str
    model: bytes
    page_bytes: int
    send: Callable[[str, Wire, bytes], None]
    report: Callable[[Report], None]
    later: Callable[[float, Callable[[], None]], Timer]
    read: Callable[[WantedBytes, Callable[[bytes], None]], None]
    state_bytes: int = 0
