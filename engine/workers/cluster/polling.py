"""A thread that looks after a store: what is said there may take its time, and no event loop must wait for it.

Owns: the thread and its pace.  Does not know: the store, what a round does.
"""

import asyncio
import threading
from collections.abc import Callable


class Polling:
    """From ``start`` on ``begin`` once, then ``go`` every ``pause_s``, on a daemon thread.

    failed: called on the loop with what either of them raises; after that there are no more rounds."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], None],
        go: Callable[[], None],
        failed: Callable[[Exception], None],
        *,
        pause_s: float,
    ) -> None:
        self._begin = begin
        self._go = go
        self._failed = failed
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._due = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Once whoever is called by it knows it."""
        self._thread.start()

    def hurry(self) -> None:
        """There is something to say: begin the next round now."""
        self._due.set()

    def end(self) -> None:
        """No more rounds; the one that is under way may go on, unheard."""
        self._is_over = True
        self._due.set()

    def tell(self, callback: Callable[[], None]) -> None:
        """From a round to the loop; nobody listens there any more after the end."""
        if not self._is_over:
            try:
                self._loop.call_soon_threadsafe(callback)
            except RuntimeError:  # the loop is closed
                self._is_over = True

    def _run(self) -> None:
        try:
            self._begin()
            while not self._is_over:
                self._go()
                self._due.wait(self._pause_s)
                self._due.clear()
        except Exception as error:
            failure = error  # the name above ends with this block
            self.tell(lambda: self._failed(failure))
