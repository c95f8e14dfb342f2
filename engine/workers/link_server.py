"""The engine's ends of links to its child processes: where they are made, who is let in, and when their files go.

Owns: one ZeroMQ context, its doorman, the directory of unix sockets, the links.
Does not know: processes, what is said on a link.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from engine.messages import Message
from engine.workers.keys import ClientKeys, Doorman, KeyPair
from engine.workers.link import SocketLink
from engine.workers.socket_directory import SocketDirectory

Incoming = TypeVar("Incoming", bound=Message)


class Switchboard:
    """where: as ``placement.link`` says it.  meeting: those who connect also meet each other, at ``rendezvous``.

    Raises ConfigError if sockets cannot be made there."""

    def __init__(self, where: str, *, meeting: bool = False) -> None:
        self._where = where
        self._directory: SocketDirectory | None = None
        if where.startswith("unix"):
            base = where.removeprefix("unix").removeprefix(":")
            self._directory = SocketDirectory(Path(base) if base else None)
        elif meeting:
            self._directory = SocketDirectory()
        self.rendezvous = self._directory.rendezvous() if meeting and self._directory is not None else ""
        self._links: list[SocketLink[Any]] = []
        self._context = zmq.Context()
        self._doorman = Doorman(self._context)

    def open(
        self,
        name: str,
        accepts: Any,
        deliver: Callable[[Incoming], None],
        *,
        capacity: int,
        place: tuple[str, KeyPair, ClientKeys] | None = None,
    ) -> tuple[SocketLink[Incoming], str, ClientKeys]:
        """A new link, the address that it waits at, and the keys that let one client in; the rest as in SocketLink.

        place: where it waits, and both ends' keys; without it, where the others do, with keys that are drawn.
        Raises ConfigError or LinkError if it cannot be made."""
        link: SocketLink[Incoming] = SocketLink(name, self._context, accepts, deliver, capacity=capacity)
        self._links.append(link)
        where, ours, theirs = place or self._draw_place(name)
        self._doorman.admit(name, frozenset((theirs.own.public,)))
        return link, link.bind(where, ours), theirs

    def _draw_place(self, name: str) -> tuple[str, KeyPair, ClientKeys]:
        ours = KeyPair.draw()
        where = self._directory.endpoint(name) if self._directory and self._where.startswith("unix") else self._where
        return where, ours, ClientKeys(KeyPair.draw(), ours.public)

    def leave_directory(self) -> None:
        """All are connected, and nobody meets here: sockets need their files no longer.  Leave nothing to clean up."""
        if self._directory is not None:
            self._directory.remove()

    def close(self) -> None:
        """Close every link, and let go of the files; again: no effect."""
        for link in self._links:
            link.close()
        self._doorman.close()
        self.leave_directory()
        self._context.term()
