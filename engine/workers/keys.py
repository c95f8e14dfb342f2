"""CURVE keys of links: they decide which process may connect, and encrypt what is sent.

Owns: key pairs, and the admission of clients.  Does not know: messages, which processes need a link.
Unix sockets have keys too.  There the file system and the kernel check the user of the peer, but the first process to
connect to a PAIR socket takes the place of the intended one, and without a key it is refused.  On frames as small as a
step's the cost is not measurable.
"""

import asyncio
import hashlib
import logging
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MAX_LOGGED_REFUSALS = 20  # a refused client retries ten times a second; later refusals are only counted
NUM_ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, client key


class KeyPair(msgspec.Struct, frozen=True, array_like=True):
    """A key pair as Z85 text.  The secret key is sent to the process that uses it alone, over a pipe."""

    public: bytes
    secret: bytes

    @classmethod
    def draw(cls) -> "KeyPair":
        """Return a new pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def derive(cls, shared: str, purpose: str) -> "KeyPair":
        """Return the pair for this purpose that every process with the shared secret derives, and no other can."""
        key = hashlib.blake2b(shared.encode(), digest_size=32).digest()
        secret = z85.encode(hashlib.blake2b(purpose.encode(), key=key, digest_size=32).digest())
        return cls(zmq.curve_public(secret), secret)


class ClientKeys(msgspec.Struct, frozen=True, array_like=True):
    """The keys of a client: its own pair, and the server's public key."""

    own: KeyPair
    server: bytes


class Authenticator:
    """Authenticates each client that connects to the CURVE sockets of a context (ZAP, RFC 27).

    domain: of the socket -> the keys that it admits.  Any other client is refused and logged."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self.num_refused = 0
        self._clients: dict[bytes, frozenset[bytes]] = {}
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)

    def admit(self, domain: str, clients: frozenset[bytes]) -> None:
        """Admit clients with these keys, as Z85 text, to the sockets of a domain."""
        self._clients[domain.encode()] = frozenset(z85.decode(key) for key in clients)

    def close(self) -> None:
        """Stop answering, so that no more clients are admitted."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _readable(self) -> None:
        while not self._socket.closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, frames: list[bytes]) -> None:
        domain, mechanism, key = frames[2], frames[5], frames[-1]
        welcome = len(frames) == NUM_ZAP_FRAMES and mechanism == b"CURVE" and key in self._clients.get(domain, ())
        if not welcome:
            self.num_refused += 1
            if self.num_refused <= MAX_LOGGED_REFUSALS:
                log.warning("link %s: a client without a known key was refused", domain.decode(errors="replace"))
        code, text = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        self._socket.send_multipart([b"1.0", frames[1], code, text, b"", b""])
