"""What happened to cached pages, for those who route requests to where their prefix is.

Owns: the batch of events since it was last asked for, page hashes.  Does not know: who listens.
Nothing is hashed or noted unless somebody does.

Chained hashes name cached pages the same way in every process: hash(page) = SHA-256(hash(page before) + the page's
tokens); before the first page stands the namespace's seed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.kv.node import Namespace, Node, Root

Tier = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Pages came to or left a tier.  'restored' pages came back to the device from the host, which keeps its copy.

    hashes: of the pages, in order.  parent: the hash before the first.
    tokens: what a stored event's pages hold, int32s; empty for the others."""

    kind: Literal["stored", "removed", "restored"]
    tier: Tier
    namespace: Namespace
    parent: bytes
    hashes: tuple[bytes, ...]
    tokens: bytes


class EventLog:
    """Collects events; ``drain`` hands them over."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._events: list[KVEvent] = []

    def stored(self, node: Node, tier: Tier, first_page: int = 0) -> None:
        """A node's pages from ``first_page`` on are in ``tier`` now."""
        self._note("stored", tier, node, first_page, bytes(node.key[first_page * self._page_bytes :]))

    def removed(self, node: Node, tier: Tier) -> None:
        """A node is about to lose, or has just lost, its pages in ``tier``; it still knows its parent."""
        self._note("removed", tier, node, 0, b"")

    def restored(self, node: Node) -> None:
        """A node's pages were copied from the host."""
        self._note("restored", "device", node, 0, b"")

    def drain(self) -> list[KVEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _note(
        self, kind: Literal["stored", "removed", "restored"], tier: Tier, node: Node, first_page: int, tokens: bytes
    ) -> None:
        hashes = page_hashes(node, self._page_bytes)
        above = node.parent
        assert above is not None
        parent = hashes[first_page - 1] if first_page else page_hashes(above, self._page_bytes)[-1]
        while above.parent is not None:
            above = above.parent
        assert isinstance(above, Root)
        self._events.append(KVEvent(kind, tier, above.namespace, parent, tuple(hashes[first_page:]), tokens))


def namespace_seed(namespace: Namespace) -> bytes:
    """What stands before a namespace's first page.  Lengths keep ("ab", "c") apart from ("a", "bc")."""
    parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_hashes(node: Node, page_bytes: int) -> list[bytes]:
    """The hash of each page of a node, computed when first asked for and kept with the node.  Do not change it."""
    unfinished: list[Node] = []
    above = node
    while above.parent is not None and len(above.hashes or ()) * page_bytes < len(above.key):
        unfinished.append(above)
        above = above.parent
    if isinstance(above, Root) and above.hashes is None:
        above.hashes = [namespace_seed(above.namespace)]
    assert above.hashes
    previous = above.hashes[-1]
    for below in reversed(unfinished):
        hashes = below.hashes = below.hashes or []
        previous = hashes[-1] if hashes else previous
        hashes += chained(previous, bytes(below.key[len(hashes) * page_bytes :]), page_bytes)
        previous = hashes[-1]
    return node.hashes or []


def chained(parent: bytes, key: bytes, page_bytes: int) -> Iterator[bytes]:
    """The hash of each page of ``key``, one after the other.  parent: the hash before the first."""
    for start in range(0, len(key), page_bytes):
        digest = hashlib.sha256(parent)
        digest.update(key[start : start + page_bytes])
        yield (parent := digest.digest())
