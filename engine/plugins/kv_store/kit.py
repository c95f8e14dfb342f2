"""The conformance kit for stores of KV pages: one call checks a store, and lists every case that fails.

    from engine.plugins.kv_store.kit import check_kv_store
    check_kv_store(lambda: FolderStore(path))

Owns: random records and their names.  Does not know: torch, the places of records.
"""

import threading
from collections.abc import Callable

import numpy as np

from engine.plugins.kv_store.store import KVStore
from engine.plugins.proof.findings import Findings

RECORD_BYTES = 1000
NUM_RECORDS = 40
NUM_ROUNDS = 400


def check_kv_store(make: Callable[[], KVStore]) -> None:
    """Write and read back a few small records.  Raises ConformanceError with all that fails.

    make: builds a store with room for a megabyte, as the plugin's hook does; it may contain records of an earlier
    store, or of another open one."""
    findings = Findings("KV store")
    for name, check in CASES.items():
        with findings.case(name):
            store = make()
            assert isinstance(store, KVStore), f"{store!r} lacks a method of KVStore"
            try:
                check(store)
            finally:
                store.close()
    with findings.case("two that are open at once"):
        first, second = make(), make()
        try:
            both = _name("both")
            first.put(both, memoryview(_record(both)))
            # The other store may find it, or not.
            assert _get(second, both) in (b"", bytes(_record(both))), "one returns a record that the other never got"
        finally:
            first.close()
            second.close()
    findings.conclude()


def _name(text: str) -> bytes:
    return np.random.default_rng(list(text.encode())).bytes(32)


def _record(name: bytes) -> bytearray:
    """Return the record that belongs to a name."""
    return bytearray(np.random.default_rng(list(name)).bytes(RECORD_BYTES))


def _get(store: KVStore, name: bytes, size: bytes = b"\0" * RECORD_BYTES) -> bytes:
    """Return the bytes stored under a name; b"" if there are none."""
    record = bytearray(size)
    found = store.get(name, memoryview(record))
    assert found is True or found is False, f"get returned {found!r}, not True or False"
    return bytes(record) if found else b""


def _gives_back(store: KVStore) -> None:
    names = [_name(f"gives back {number}") for number in range(NUM_RECORDS)]
    record = bytearray(RECORD_BYTES)
    for name in names:
        record[:] = _record(name)  # reuses the same memory, as the engine may
        store.put(name, memoryview(record))
    for name in names:
        assert _get(store, name) == _record(name), "a record does not come back as it was put"


def _misses(store: KVStore) -> None:
    assert not _get(store, _name("never put")), "a name that was never put is found"


def _minds_sizes(store: KVStore) -> None:
    name = _name("sizes")
    store.put(name, memoryview(_record(name)))
    for size in (RECORD_BYTES - 1, RECORD_BYTES + 1):
        assert not _get(store, name, bytes(size)), f"a record of {RECORD_BYTES} bytes fills {size}"


def _discards(store: KVStore) -> None:
    name = _name("discards")
    store.discard(name)  # no record exists
    store.put(name, memoryview(_record(name)[::-1]))
    store.discard(name)
    assert not _get(store, name), "a record is found after its discard"
    store.put(name, memoryview(_record(name)))
    assert _get(store, name) == _record(name), "a record that is put after a discard is not found"


def _takes_two_threads(store: KVStore) -> None:
    """Put on one thread while another reads, as the engine does."""
    names = [_name(f"threads {number}") for number in range(NUM_RECORDS)]
    raised: list[Exception] = []

    def put() -> None:
        try:
            for number in range(NUM_ROUNDS):
                name = names[number % NUM_RECORDS]
                store.put(name, memoryview(_record(name)))
        except Exception as error:
            raised.append(error)

    writer = threading.Thread(target=put)
    writer.start()
    try:
        for number in range(NUM_ROUNDS):
            name = names[number * 7 % NUM_RECORDS]
            assert _get(store, name) in (b"", bytes(_record(name))), "a record is read while it is half written"
            if number % 5 == 0:
                store.discard(name)
    finally:
        writer.join()
    assert not raised, f"put raised {raised[0]!r} during a get"


CASES: dict[str, Callable[[KVStore], None]] = {
    "what was put comes back": _gives_back,
    "a miss": _misses,
    "a record of another size": _minds_sizes,
    "discard": _discards,
    "two threads": _takes_two_threads,
}
