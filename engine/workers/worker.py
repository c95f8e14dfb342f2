"""A worker as its group has it, wherever it runs.

Owns: what can be asked of one and what it reports.  Does not know: how it is started or watched, what it does.
"""

from typing import Protocol, TypeVar

from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.messages import WorkerAlive, WorkerReady

Said = TypeVar("Said", bound=Message)  # what a worker says, but for how it is
Told = TypeVar("Told", bound=Message)  # what it is told
Said_contra = TypeVar("Said_contra", bound=Message, contravariant=True)
Told_contra = TypeVar("Told_contra", bound=Message, contravariant=True)


class WorkerLost(CallboardError):
    """A worker is gone.  What it says names the worker.

    error: what it raised, if it got to say so.  curable: another one may do better."""

    def __init__(self, reason: str, error: Exception | None = None, *, curable: bool = True) -> None:
        super().__init__(reason)
        self.error = error
        self.curable = curable


class Reports(Protocol[Said_contra]):
    """Where a worker's holder tells what it does; all calls on the event loop."""

    def heard(self, message: Said_contra | WorkerReady | WorkerAlive) -> None:
        """It has said something."""
        ...

    def lost(self, loss: WorkerLost) -> None:
        """It is gone."""
        ...


class Worker(Protocol[Told_contra]):
    """One worker, wherever it runs."""

    def put(self, message: Told_contra) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the worker takes nothing."""
        ...

    async def end(self) -> None:
        """Let it finish what it has, and end; returns when it has ended, or has had its time."""
        ...

    async def kill(self, *, is_stuck: bool) -> None:
        """End it at once if it still runs; returns when nothing is left that could be ended.  Also after ``end``.

        is_stuck: one of its generation hangs; do not wait for a worker that cannot be ended."""
        ...
