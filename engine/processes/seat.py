"""The place of a rank that runs on another machine, where the group keeps a ``Child`` for one that runs on this one.

Owns: whether its process has ended, as far as one can know.  Does not know: machines, who starts that process.
"""

import asyncio


class Seat:
    """Taken until its rank is said to have left, or is given up."""

    def __init__(self) -> None:
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Its process has ended."""
        self._left.set()

    def kill(self) -> None:
        """Wait for it no longer: it is its joiner that ends it, and before it starts another one."""
        self._left.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        try:
            await asyncio.wait_for(self._left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
