"""Chained page hashes: names for cached pages that mean the same in every process.

Owns: how a page's name follows from its tokens and those before it.  Does not know: events, tiers.
hash(page) = SHA-256(hash(page before) + the page's tokens); before the first page stands the namespace's seed.
"""

import hashlib

from engine.kv.node import Namespace, Node, Root


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
        for start in range(len(hashes) * page_bytes, len(below.key), page_bytes):
            previous = hashlib.sha256(previous + below.key[start : start + page_bytes]).digest()
            hashes.append(previous)
    return node.hashes or []
