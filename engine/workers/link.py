"""A link between two processes: messages as frames on a ZeroMQ PAIR socket, read by callbacks of the event loop.

Owns: one socket; the refusal of frames; the engine's end of it, with its context, its authenticator and its directory.
Does not know: the meaning of messages, processes.
A frame that is not a message of this link is refused, counted and logged, and the link continues.  ZeroMQ itself closes
the connection on other errors (a client without a key, another user's process, a frame of more than ``HARD_LIMIT``
times the limit, half a frame).  Both ends are bounded: ``put`` never waits.
"""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq

from engine.types.errors import CallboardError
from engine.types.notices import Message
from engine.workers.keys import Authenticator, ClientKeys, KeyPair
from engine.workers.socket_directory import SocketDirectory, base_of
from engine.workers.wire import MAX_FRAME_BYTES, Wire, WireError

log = logging.getLogger(__name__)

HARD_LIMIT = 2  # a frame of this many times a link's limit is not even read
READS_PER_CALL = 64  # then other callbacks run
MAX_LOGGED_REFUSALS = 20  # per link; later refusals are only counted

Incoming = TypeVar("Incoming", bound=Message)


class LinkError(CallboardError):
    """A link cannot be made, or its other end accepts no messages."""


class SocketLink(Generic[Incoming]):
    """One end of a link.  ``put`` sends; ``deliver`` is called with each message that arrives, on the loop.

    accepts: the union of messages that may arrive here.  capacity: most messages that wait, on either side.
    """

    def __init__(
        self,
        name: str,
        context: "zmq.Context[Any]",
        accepts: Any,
        deliver: Callable[[Incoming], None],
        *,
        capacity: int,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self.num_refused = 0
        self._wire = Wire(name, max_frame_bytes, accepts)
        self._deliver = deliver
        self._socket = context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = capacity
        self._socket.maxmsgsize = HARD_LIMIT * max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._due = False

    def bind(self, endpoint: str, keys: KeyPair) -> str:
        """Listen for the other end; returns the address with its port filled in.  Raises LinkError.

        keys: this end's; a ``Authenticator`` must have the other end's under the link's name."""
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.zap_domain = self.name.encode()
        if endpoint.startswith("ipc:"):
            # Only this user can enter the directory; the kernel checks the peer's user as well.
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise LinkError(f"link {self.name}: cannot listen on {endpoint}: {error.strerror}") from None
        if endpoint.startswith("ipc:"):
            os.chmod(endpoint.removeprefix("ipc://"), stat.S_IRUSR | stat.S_IWUSR)
        self._watch()
        return str(self._socket.last_endpoint.decode())

    def connect(self, endpoint: str, keys: ClientKeys) -> None:
        """Connect to the end that listens at ``endpoint``."""
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.own.public, keys.own.secret
        self._socket.curve_serverkey = keys.server
        self._socket.connect(endpoint)
        self._watch()

    def put(self, message: Message) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the other end accepts nothing."""
        frame = self._wire.encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            reason = f"link {self.name}: {type(message).__name__} cannot be sent: {error.strerror}"
            raise LinkError(reason) from None
        self._look_again()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop delivering; queued messages may still be sent for ``linger_s``.  Idempotent."""
        if self._socket.closed:
            return
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._socket.close(linger=int(linger_s * 1000))

    # ---- reading ----------------------------------------------------------------------------

    def _watch(self) -> None:
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._look_again()

    def _look_again(self) -> None:
        """Check for input again: ZeroMQ's descriptor signals a change once, and any socket call may consume that."""
        if not self._due and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._due = True
            self._loop.call_soon(self._read_due)

    def _read_due(self) -> None:
        self._due = False
        self._readable()

    def _readable(self) -> None:
        for _ in range(READS_PER_CALL):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._socket.getsockopt(zmq.RCVMORE):
                while self._socket.getsockopt(zmq.RCVMORE):
                    self._socket.recv(zmq.NOBLOCK)
                self._refuse("a message in several frames")
                continue
            try:
                message = self._wire.decode(frame)
            except WireError as error:
                self._refuse(str(error))
                continue
            self._deliver(message)  # type: ignore[arg-type]
        if not self._socket.closed:
            self._look_again()

    def _refuse(self, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused <= MAX_LOGGED_REFUSALS:
            # The reason may quote untrusted input.
            log.warning("link %s: refused: %s", self.name, reason[:300].encode("unicode_escape").decode())


class LinkServer(Generic[Incoming]):
    """The engine's end of a link, with all that it needs.

    where: an address as in ``placement.link``.  accepts, deliver, capacity: as in ``SocketLink``.
    endpoint, client: the address and keys for the other end.
    Raises ConfigError or LinkError if the link cannot be made."""

    def __init__(
        self,
        name: str,
        where: str,
        accepts: Any,
        deliver: Callable[[Incoming], None],
        *,
        capacity: int,
    ) -> None:
        self._directory = SocketDirectory(base_of(where)) if where.startswith("unix") else None
        self._context = zmq.Context()
        self.authenticator = Authenticator(self._context)
        self.link: SocketLink[Incoming] = SocketLink(name, self._context, accepts, deliver, capacity=capacity)
        ours = KeyPair.draw()
        self.client = ClientKeys(KeyPair.draw(), ours.public)
        try:
            self.authenticator.admit(name, frozenset((self.client.own.public,)))
            self.endpoint = self.link.bind(self._directory.endpoint(name) if self._directory else where, ours)
        except BaseException:
            self.close()
            raise

    def leave_directory(self) -> None:
        """Remove the socket's file: a connected link does not need it, and nothing is left to clean up."""
        if self._directory is not None:
            self._directory.remove()

    def close(self) -> None:
        """Close the link and remove its files; idempotent."""
        self.link.close()
        self.authenticator.close()
        self.leave_directory()
        self._context.term()
