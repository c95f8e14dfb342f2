"""A store of pages that fails, is slow, and gives back torn pages and those of others, all by luck.

Owns: what it keeps, and what it does wrong.  Does not know: what is right.
"""

from engine.features.kv_store.records import DIGEST_BYTES
from server.extensions.chaos.sim.luck import luck

FAULTS = ("raises", "misses", "torn", "foreign")


class SimStore:
    """A store in memory.  faults: share of bad calls.  Its pages are there again after executors were lost."""

    def __init__(self, seed: int, faults: float) -> None:
        self._seed = seed
        self._faults = faults
        self._kept: dict[bytes, bytes] = {}
        self._num_calls = 0

    def get(self, name: bytes, record: memoryview) -> bool:
        """Read a page, or something else."""
        fault, kept = self._fault(), self._kept.get(name)
        if fault == "raises":
            raise OSError("the store cannot be read")
        if kept is None or fault == "misses":
            return False
        if fault == "foreign":
            kept = next(one for one in self._kept.values() if len(one) == len(record))
        if fault == "torn":
            half = DIGEST_BYTES + (len(kept) - DIGEST_BYTES) // 2
            kept = kept[:half] + bytes(len(kept) - half)
        record[:] = kept
        return True

    def put(self, name: bytes, record: memoryview) -> None:
        """Keep a page, or a part of it."""
        fault = self._fault()
        if fault == "raises":
            raise OSError(28, "no space left on the device")
        kept = bytes(record)
        if fault == "torn":
            kept = kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2)
        if fault != "misses":
            self._kept[name] = kept

    def discard(self, name: bytes) -> None:
        self._kept.pop(name, None)

    def close(self) -> None:
        """Do nothing."""

    def _fault(self) -> str:
        self._num_calls += 1
        draw = luck(self._seed, 0x5, self._num_calls)
        return FAULTS[int(draw / self._faults * len(FAULTS))] if draw < self._faults else ""
