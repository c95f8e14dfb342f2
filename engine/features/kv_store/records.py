"""Records of pages in a store: their names, and the digests that prove that a record is the right one.

Owns: names and digests.  Does not know: where a store keeps records, threads, which pages are wanted.
A record's name is a hash of everything that its bytes depend on: what computed it (the ``namespace``: model, dtype,
shape, rank) and the page's chained hash (``engine/kv/node.py``), of every token up to its end and the cache salt.
A record begins with a SHA-256 of its name and its page.  So a record that is torn, foreign or of another page is a
miss, whatever the store has done to it.
"""

import hashlib

from engine.plugins.kv_store.store import KVStore

DIGEST_BYTES = 32


class PageRecords:
    """Pages of one rank in a store.  namespace: digest of what computes them.  page_bytes: size of each page."""

    def __init__(self, store: KVStore, namespace: bytes, page_bytes: int) -> None:
        self.store = store
        self.record_bytes = DIGEST_BYTES + page_bytes
        self._namespace = namespace

    def load(self, page_hash: bytes, record: memoryview) -> bool:
        """Fill ``record`` with a digest and the page after it.  Return False if the store does not have all of it."""
        name = self._name(page_hash)
        if not self.store.get(name, record):
            return False
        if record[:DIGEST_BYTES] == _digest(name, record[DIGEST_BYTES:]):
            return True
        self.store.discard(name)
        return False

    def save(self, page_hash: bytes, record: memoryview) -> None:
        """Store a page.  record: room for a digest, and the page after it."""
        name = self._name(page_hash)
        record[:DIGEST_BYTES] = _digest(name, record[DIGEST_BYTES:])
        self.store.put(name, record)

    def _name(self, page_hash: bytes) -> bytes:
        return hashlib.sha256(self._namespace + page_hash).digest()


def _digest(name: bytes, page: memoryview) -> bytes:
    digest = hashlib.sha256(name)
    digest.update(page)
    return digest.digest()
