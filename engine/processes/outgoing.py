"""What a child process says: its actor's words and its own heartbeat, on the link to its engine.

Owns: what becomes of a word that cannot be sent.  Does not know: what is said.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from engine.errors import CallboardError
from engine.links.socket import LinkError, SocketLink
from engine.messages import Message


class Outgoing:
    """Where the actor puts its messages.  failed: why one could not be sent; without it nothing goes on."""

    def __init__(self, link: SocketLink[Any]) -> None:
        self.failed: asyncio.Future[CallboardError] = asyncio.get_running_loop().create_future()
        self.link = link

    def put(self, message: Message) -> None:
        """Send."""
        try:
            self.link.put(message)
        except CallboardError as error:
            self.fail(error)

    def fail(self, error: CallboardError) -> None:
        """Only the first one counts."""
        if not self.failed.done():
            self.failed.set_result(error)


async def beat(link: SocketLink[Any], interval_s: float, alive: Callable[[], Message]) -> None:
    """Say that this process is alive, for ever."""
    while True:
        await asyncio.sleep(interval_s)
        with contextlib.suppress(LinkError):  # nobody listens just now: then nobody would miss it either
            link.put(alive())
