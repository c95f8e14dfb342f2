"""Carries KV pages between machines over TCP, by ZeroMQ with CURVE.

Every rank listens on a port of its own and connects to those of its peers.  All keys follow from the secret in
``key_file``: without it a process can neither connect nor read.  What a peer does not take in time is lost.
"""

import hashlib
import os
import queue
import re
import select
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any, Final

import zmq
from msgspec import Meta
from zmq.utils import z85

from engine.plugins.hookspecs import TransferContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.transfer.options import CarrierOptions
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["zmq"]}

PLACE: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
ZAP: Final = "inproc://zeromq.zap.01"
NUM_ZAP_FRAMES: Final = 7
LEAST_KEY: Final = 16  # characters
MOST_PEERS: Final = 64  # whose connections stay open
READS_PER_TURN: Final = 16


class TcpOptions(CarrierOptions, frozen=True, kw_only=True):
    """Options of the plugin, besides those of every carrier.

    peers: name of each engine, also this one, -> 'tcp://HOST:PORT'; rank r has PORT + r.
    key_file: a file with the secret that all engines share; 'openssl rand -hex 32' prints one.
    listen: where to listen, 'tcp://ADDRESS:PORT'; auto is this engine's entry in peers.
    most_waiting: messages that wait for one peer."""

    peers: dict[str, str] | None = None
    key_file: str | None = None
    listen: str = "auto"
    most_waiting: Annotated[int, Meta(ge=1)] = 64


class TcpTransfer:
    """One rank's sockets, on a thread of its own.  Raises PluginError if it cannot listen."""

    def __init__(self, context: TransferContext, options: TcpOptions) -> None:
        self._rank = context.rank
        self._places = options.peers or {}
        self._receive = context.receive
        self._most_bytes = context.most_bytes
        secret = _secret_in(options.key_file)
        self._server, self._client = _derived(secret, "server"), _derived(secret, "client")
        self._most_waiting = options.most_waiting
        self.address = self.locate(options.name)
        listen = self.address if options.listen == "auto" else _with_rank(options.listen, self._rank)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = self._context.socket(zmq.REP)
        self._gate.bind(ZAP)
        self._inbox = self._socket(zmq.ROUTER)
        self._inbox.curve_server = True
        self._inbox.zap_domain = b"transfer"
        self._inbox.curve_publickey, self._inbox.curve_secretkey = self._server
        try:
            self._inbox.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PluginError(
                f"transfer.tcp: cannot listen on {listen}: {error.strerror}; set plugins.options.'transfer.tcp'.listen"
            ) from None
        self._peers: OrderedDict[str, zmq.Socket[Any]] = OrderedDict()
        self._outgoing: queue.Queue[tuple[str, bytes, bytes]] = queue.Queue(maxsize=4 * options.most_waiting)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"transfer{self._rank}", daemon=True)
        self._thread.start()

    def locate(self, name: str) -> str:
        if name not in self._places:
            raise ValueError(f"{name!r} is not in peers")
        return _with_rank(self._places[name], self._rank)

    def send(self, address: str, message: bytes, payload: bytes) -> None:
        """Let the thread send."""
        if self._is_closed:
            return
        try:
            self._outgoing.put_nowait((address, message, payload))
        except queue.Full:
            return
        self._wake_up()

    def close(self) -> None:
        """End the thread and all connections."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_up()
        self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)

    # ---- the thread -------------------------------------------------------------------------

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._gate, self._inbox, self._wake):
            poller.register(one, select.POLLIN)
        while not self._is_closed:
            due = dict(poller.poll())
            if self._wake in due:
                os.eventfd_read(self._wake)
            if self._gate in due:
                self._admit()
            for _ in range(READS_PER_TURN):
                if self._is_closed or not self._inbox.poll(0):
                    break
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 3:  # the first one names the connection
                    self._receive(frames[1], frames[2])
            while not self._outgoing.empty():
                self._put(*self._outgoing.get())

    def _admit(self) -> None:
        """Answer whether a client may connect (ZAP, RFC 27)."""
        frames = self._gate.recv_multipart()
        known = len(frames) == NUM_ZAP_FRAMES and frames[5:] == [b"CURVE", z85.decode(self._client[0])]
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._gate.send_multipart([b"1.0", frames[1], code, text, b"", b""])

    def _put(self, address: str, message: bytes, payload: bytes) -> None:
        peer = self._peers.get(address)
        if peer is None:
            if not PLACE.fullmatch(address):
                return
            peer = self._peers[address] = self._socket(zmq.DEALER)
            peer.curve_publickey, peer.curve_secretkey = self._client
            peer.curve_serverkey = self._server[0]
            peer.connect(address)
            if len(self._peers) > MOST_PEERS:
                self._peers.popitem(last=False)[1].close(linger=0)
        self._peers.move_to_end(address)
        try:
            peer.send_multipart([message, payload], zmq.NOBLOCK)
        except zmq.Again:
            return  # it is behind

    def _socket(self, kind: int) -> "zmq.Socket[Any]":
        made: zmq.Socket[Any] = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = self._most_waiting
        made.maxmsgsize = self._most_bytes
        return made


def _secret_in(path: str | None) -> bytes:
    """Return the secret in a file.  Raises PluginError."""
    try:
        secret = Path(path or "").expanduser().read_bytes().strip()
    except OSError as error:
        raise PluginError(f"transfer.tcp: key_file={path!r} cannot be read: {error.strerror}") from None
    if len(secret) < LEAST_KEY:
        raise PluginError(
            f"transfer.tcp: key_file={path!r} has {len(secret)} characters, expected at least {LEAST_KEY}; "
            "'openssl rand -hex 32' prints a secret"
        )
    return secret


def _derived(secret: bytes, side: str) -> tuple[bytes, bytes]:
    """Return a public and a secret key, as Z85 text, that all engines with the secret derive alike."""
    digest = hashlib.blake2b(side.encode(), key=hashlib.sha256(secret).digest(), digest_size=32).digest()
    own = z85.encode(digest)
    return zmq.curve_public(own), own


def _with_rank(place: str, rank: int) -> str:
    """Return the address of a rank.  Raises ValueError."""
    found = PLACE.fullmatch(place)
    if found is None or not 0 < int(found[2]) + rank < 1 << 16:
        raise ValueError(f"{place!r} is no 'tcp://HOST:PORT'")
    return f"tcp://{found[1]}:{int(found[2]) + rank}"


@hookimpl
def callboard_transfer(context: TransferContext) -> TcpTransfer:
    """Build the carrier."""
    options = decode_options("transfer.tcp", context.options, TcpOptions)
    try:
        return TcpTransfer(context, options)
    except ValueError as error:
        raise PluginError(
            f"transfer.tcp: {error}; give plugins.options.'transfer.tcp'.peers an entry {options.name} = "
            "'tcp://HOST:PORT'"
        ) from None
