"""The thread of a rank that reads adapters while steps run.

Owns: the thread, and what it has read that no step has placed yet.  Does not know: files, slots.
The planner limits how many adapters are read or kept here at once.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from engine.features.lora.files import Adapter

log = logging.getLogger(__name__)

LOST: Final = "the adapter of this request can no longer be read; the server log has the details"

T = TypeVar("T")
_Work = Callable[[], None]


class AdapterReader(Generic[T]):
    """What was read of adapters, by digest.  read: reads one; it may raise any error."""

    def __init__(self, read: Callable[[Adapter], T], rank: int) -> None:
        self._read = read
        self._rank = rank
        self._kept: dict[str, T] = {}
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, adapter: Adapter, done: Callable[[str], None]) -> None:
        """Read an adapter soon.  done: called on the thread, with the reason why it cannot be read, '' if it is."""

        def read() -> None:
            found, reason = self.read(adapter)
            if found is not None:
                self._kept[adapter.digest] = found
            done(reason)

        self._put(read)

    def drop(self, adapter: Adapter) -> None:
        """Forget what the requests before have read of an adapter."""

        def drop() -> None:
            self._kept.pop(adapter.digest, None)

        self._put(drop)

    def read(self, adapter: Adapter) -> tuple[T | None, str]:
        """Read an adapter now.  Return it, and the reason why it cannot be read, '' if it is."""
        try:
            return self._read(adapter), ""
        except Exception:  # the files are not what they were when they were checked
            log.exception("adapter %s cannot be read", adapter.path)
            return None, LOST

    def take(self, adapter: Adapter) -> T:
        """Return an adapter that ``begin`` has read, and keep it no longer."""
        return self._kept.pop(adapter.digest)

    def _put(self, work: _Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"adapters {self._rank}", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def leave(self) -> None:
        """End the thread without a wait."""
        self._work.put(None)
