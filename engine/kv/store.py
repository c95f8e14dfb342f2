"""Stored pages: what a store of the third tier is, who fetches from it, and what makes a page from it the right one.

Owns: the names of records, their digests.  Does not know: where a store keeps them, threads, which pages are wanted.
A record's name is a hash of everything that its bytes depend on: what computed it (the ``namespace``: model, dtype,
shape, rank) and the page's chained hash (``engine/kv/node.py``), of every token up to its end and the cache salt.
A record begins with a SHA-256 of its name and its page.  So a record that is torn, foreign or of another page is a
miss, whatever the store has done to it.
"""

import hashlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from engine.messages import FetchPages, PagesFetched

DIGEST_BYTES = 32


@runtime_checkable
class KVStore(Protocol):
    """Keeps records of one size by name, maybe beyond the end of the process, and may lose any of them at any time.

    ``get`` and ``discard`` come from one thread and ``put`` from another one, at the same time.  None may take long for
    ever: what is waited for is given up, and what should be written meanwhile is dropped.  Anything that they raise is
    a miss, or a record that is not kept; it is logged, and the next call comes all the same."""

    def get(self, name: bytes, record: memoryview) -> bool:
        """Fill ``record``, which is as long as every record is.  False if there is none of this name and size."""
        ...

    def put(self, name: bytes, record: memoryview) -> None:
        """Keep a copy of ``record``; one that is there under the same name may stay instead."""
        ...

    def discard(self, name: bytes) -> None:
        """The record of this name is damaged: forget it, so that the next ``put`` replaces it."""
        ...

    def close(self) -> None:
        """Nothing comes any more.  From the thread that puts."""
        ...


class PageFetcher(Protocol):
    """One rank's side of a store.  Calls come from any thread, and return at once but for ``close``."""

    def fetch(self, message: FetchPages, answer: Callable[[PagesFetched], None]) -> None:
        """Begin to get pages; ``answer`` is called once, at ``give_up`` at the latest, on any thread."""
        ...

    def give_up(self, fetch_id: int) -> None:
        """A fetch's time is over: answer with what has come, unless that is done."""
        ...

    def close(self) -> None:
        """No step comes any more: write what waits to be written, within limits."""
        ...


class PageRecords:
    """Pages of one rank in a store.  namespace: of what computes them.  page_bytes: of each of them."""

    def __init__(self, store: KVStore, namespace: bytes, page_bytes: int) -> None:
        self.store = store
        self.record_bytes = DIGEST_BYTES + page_bytes
        self._namespace = namespace

    def load(self, page_hash: bytes, record: memoryview) -> bool:
        """Fill ``record`` with a digest and, behind it, the page.  False if the store has not got it whole."""
        name = self._name(page_hash)
        if not self.store.get(name, record):
            return False
        if record[:DIGEST_BYTES] == _digest(name, record[DIGEST_BYTES:]):
            return True
        self.store.discard(name)
        return False

    def save(self, page_hash: bytes, record: memoryview) -> None:
        """Put the page that lies in ``record`` behind room for a digest."""
        name = self._name(page_hash)
        record[:DIGEST_BYTES] = _digest(name, record[DIGEST_BYTES:])
        self.store.put(name, record)

    def _name(self, page_hash: bytes) -> bytes:
        return hashlib.sha256(self._namespace + page_hash).digest()


def _digest(name: bytes, page: memoryview) -> bytes:
    digest = hashlib.sha256(name)
    digest.update(page)
    return digest.digest()
