"""Events of cached pages, for routers that send a request to the engine that has its prefix.

Owns: the events since the last ``drain``.  Does not know: which listeners there are, how pages are hashed.
Nothing is hashed or noted unless events are recorded.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.kv.node import Namespace, Node, Root

Tier = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Pages came to or left a tier.  'restored' pages came back to the device from the host, which keeps its copy.

    hashes: hashes of the pages, in order; with a lookahead, of their pairs of tokens.
    parent: the hash before the first.
    tokens: the tokens of the pages, int32s; empty for removed ones."""

    kind: Literal["stored", "removed", "restored"]
    tier: Tier
    namespace: Namespace
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: bytes


class EventLog:
    """A list of events; ``drain`` empties it."""

    def __init__(self, page_bytes: int, *, stride: int = 1) -> None:
        """Begin an empty log.  stride: number of tokens in an element of a key, of which the first is the page's."""
        self._page_bytes = page_bytes
        self._stride = stride
        self._events: list[KVEvent] = []

    def stored(self, node: Node, tier: Tier, first_page: int = 0) -> None:
        """Note that a node's pages from ``first_page`` on are in ``tier`` now."""
        self._note("stored", tier, node, first_page, self._tokens(node, first_page))

    def removed(self, node: Node, tier: Tier) -> None:
        """Note that a node loses its pages in ``tier``; the node must still have its parent."""
        self._note("removed", tier, node, 0, b"")

    def restored(self, node: Node) -> None:
        """Note that a node's pages were copied from the host."""
        self._note("restored", "device", node, 0, self._tokens(node, 0))

    def drain(self) -> list[KVEvent]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _tokens(self, node: Node, first_page: int) -> bytes:
        tokens = bytes(node.key[first_page * self._page_bytes :])
        return tokens if self._stride == 1 else np.frombuffer(tokens, dtype=np.int32)[:: self._stride].tobytes()

    def _note(
        self, kind: Literal["stored", "removed", "restored"], tier: Tier, node: Node, first_page: int, tokens: bytes
    ) -> None:
        hashes = node.page_hashes
        above = node.parent
        assert above is not None
        parent = hashes[first_page - 1] if first_page else above.page_hashes[-1]
        while above.parent is not None:
            above = above.parent
        assert isinstance(above, Root)
        self._events.append(KVEvent(kind, tier, above.namespace, parent, tuple(hashes[first_page:]), tokens))
