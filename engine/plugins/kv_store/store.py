"""A store of KV pages outside the engine, as a plugin provides it.

Owns: the protocol.  Does not know: where a store keeps records, what is in them.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class KVStore(Protocol):
    """A store of records of one size, by name.  It may outlive the process, and may lose any record at any time.

    ``get`` and ``discard`` come from one thread and ``put`` from another one, at the same time.  No call
    may block forever: a slow read is given up, and pages to be written meanwhile are dropped.  An error counts
    as a miss, or as a record that is not kept; it is logged, and the next call follows as usual."""

    def get(self, name: bytes, record: memoryview) -> bool:
        """Fill ``record``, which has the size of every record.  Return False if there is none of this name and size."""
        ...

    def put(self, name: bytes, record: memoryview) -> None:
        """Keep a copy of ``record``.  A present record of the same name may be kept instead."""
        ...

    def discard(self, name: bytes) -> None:
        """Forget the record of this name, which is damaged, so that the next ``put`` replaces it."""
        ...

    def close(self) -> None:
        """Close the store; no other call follows.  Called by the thread that calls ``put``."""
        ...
