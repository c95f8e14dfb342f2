"""A store of KV pages outside the engine, as a plugin provides it.

Owns: the protocol.  Does not know: where a store keeps records, what is in them.
"""

from typing import Protocol, runtime_checkable


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
        """End; no other call comes after this one.  Called by the thread that puts."""
        ...
