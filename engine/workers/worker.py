"""The interface of a worker to its group, for any placement.

Owns: its commands and its reports.  Does not know: how it is started or watched, what it does.
"""

from typing import Protocol, TypeVar

from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.messages import WorkerAlive, WorkerReady

Inbound = TypeVar("Inbound", bound=Message)  # the messages of a worker, without reports on its state
Outbound = TypeVar("Outbound", bound=Message)  # the messages to it
Inbound_contra = TypeVar("Inbound_contra", bound=Message, contravariant=True)
Outbound_contra = TypeVar("Outbound_contra", bound=Message, contravariant=True)


class WorkerLost(CallboardError):
    """A worker is gone; the message names it.

    error: what it raised, if it could report that.  curable: a restart may help."""

    def __init__(self, reason: str, error: Exception | None = None, *, curable: bool = True) -> None:
        super().__init__(reason)
        self.error = error
        self.curable = curable


class Reports(Protocol[Inbound_contra]):
    """The receiver of a worker's messages; all calls are made on the event loop."""

    def received(self, message: Inbound_contra | WorkerReady | WorkerAlive) -> None:
        """Handle a message of the worker."""
        ...

    def lost(self, loss: WorkerLost) -> None:
        """Handle the loss of the worker."""
        ...


class Worker(Protocol[Outbound_contra]):
    """One worker in any placement."""

    def put(self, message: Outbound_contra) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the worker accepts nothing."""
        ...

    async def end(self) -> None:
        """Let it finish its work and end; returns when it has ended, or on a timeout."""
        ...

    async def kill(self, *, is_stuck: bool) -> None:
        """Kill it if it still runs; returns when nothing is left that could be ended.  May follow ``end``.

        is_stuck: a worker of its generation hangs; do not wait for one that cannot be killed."""
        ...
