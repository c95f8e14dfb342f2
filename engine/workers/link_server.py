"""The engine's end of a link to one worker: where it is made, who is let in, and when its files go.

Owns: a ZeroMQ context, its doorman, the directory of a unix socket, the link.
Does not know: processes, what is said on the link.
"""

from collections.abc import Callable
from typing import Any, Generic

import zmq

from engine.workers.keys import ClientKeys, Doorman, KeyPair
from engine.workers.link import Incoming, SocketLink
from engine.workers.socket_directory import SocketDirectory, base_of


class LinkServer(Generic[Incoming]):
    """where: as ``placement.link`` says it.  accepts, deliver, capacity: as in ``SocketLink``.

    keys: both ends'; without them they are drawn.  endpoint, client: what the other end needs to reach this one.
    Raises ConfigError or LinkError if the link cannot be made."""

    def __init__(
        self,
        name: str,
        where: str,
        accepts: Any,
        deliver: Callable[[Incoming], None],
        *,
        capacity: int,
        keys: tuple[KeyPair, ClientKeys] | None = None,
    ) -> None:
        self._directory = SocketDirectory(base_of(where)) if where.startswith("unix") else None
        self._context = zmq.Context()
        self.doorman = Doorman(self._context)
        self.link: SocketLink[Incoming] = SocketLink(name, self._context, accepts, deliver, capacity=capacity)
        if keys is None:
            ours = KeyPair.draw()
            keys = ours, ClientKeys(KeyPair.draw(), ours.public)
        ours, self.client = keys
        try:
            self.doorman.admit(name, frozenset((self.client.own.public,)))
            self.endpoint = self.link.bind(self._directory.endpoint(name) if self._directory else where, ours)
        except BaseException:
            self.close()
            raise

    def leave_directory(self) -> None:
        """Remove the socket's file: a link that is connected needs it no longer, and nothing is left to clean up."""
        if self._directory is not None:
            self._directory.remove()

    def close(self) -> None:
        """Close the link, and let go of the files; again: no effect."""
        self.link.close()
        self.doorman.close()
        self.leave_directory()
        self._context.term()
