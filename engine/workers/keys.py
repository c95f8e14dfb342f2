"""CURVE: who may speak on a link, and that nobody else can listen.

Owns: key pairs, and the answer to "may this client in?".  Does not know: messages, who needs a link.
Unix sockets have it too.  The file system and the kernel say there whose process the peer is, but whatever connects to
a PAIR socket first takes the place of the one that is meant, and without a key it never gets that far.  On frames as
small as a step's it costs nothing that could be measured.
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
MAX_LOGGED_REFUSALS = 20  # who is refused comes again ten times a second; they are counted on
NUM_ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, client key


class KeyPair(msgspec.Struct, frozen=True, array_like=True):
    """Z85 text.  The secret one is told to the process that uses it, over a pipe, and to nobody else."""

    public: bytes
    secret: bytes

    @classmethod
    def draw(cls) -> "KeyPair":
        """A new one."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def derive(cls, shared: str, purpose: str) -> "KeyPair":
        """The one that everybody who knows the shared secret comes to for this purpose, and nobody else does."""
        key = hashlib.blake2b(shared.encode(), digest_size=32).digest()
        secret = z85.encode(hashlib.blake2b(purpose.encode(), key=key, digest_size=32).digest())
        return cls(zmq.curve_public(secret), secret)


class ClientKeys(msgspec.Struct, frozen=True, array_like=True):
    """What a client needs: its own pair, and the public key by which it knows the server."""

    own: KeyPair
    server: bytes


class Doorman:
    """Answers libzmq's question for every client that knocks on a context's CURVE sockets (ZAP, RFC 27).

    domain: of the socket that asks -> the keys it lets in.  Everything else is refused and logged."""

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
        """Let these into the sockets of a domain; their keys as Z85 text."""
        self._clients[domain.encode()] = frozenset(z85.decode(key) for key in clients)

    def close(self) -> None:
        """Nobody is let in any more."""
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
