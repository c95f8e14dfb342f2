"""A carrier of KV pages between engines, as a plugin provides it.

Owns: the protocol.  Does not know: what a message says, which engines there are.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class PageCarrier(Protocol):
    """One rank's connection with ranks of other engines.  It carries messages, and bytes of pages with them.

    It may lose, double, delay or reorder messages: the engine sends again what brings no answer, and recognises damaged
    pages by a digest.  So a carrier needs no retries of its own.  No call may block.  Messages that arrive go to
    ``TransferContext.receive``, on any thread, one at a time."""

    address: str
    """The place to which other ranks send, as they give it to ``send``."""

    def locate(self, name: str) -> str:
        """Return the address of this rank's counterpart in an engine.  Raises ValueError for an unknown name."""
        ...

    def send(self, address: str, message: bytes, payload: bytes) -> None:
        """Send a message, and bytes of pages or none; called on one thread.  What cannot be sent now is lost."""
        ...

    def close(self) -> None:
        """End; nothing is received after that."""
        ...
