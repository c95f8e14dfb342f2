"""Publishes events of cached pages on ZeroMQ, in the format of vLLM, for routers that follow what each engine keeps.

Owns: the format, the sockets, the batches that may be requested again.  Does not know: its subscribers, pages.

A PUB socket sends messages of three parts: the topic, the batch's number from 0 on as 8 bytes, the highest first, and
the batch in msgpack.  A subscriber that misses a number sends the first one that it wants, in 8 bytes after an empty
part, to the ROUTER socket of ``replay_endpoint``, and gets the batches from there on, each as an empty part, its number
and the batch; the number -1 with no batch is the end.  A program that connects can read
the tokens of prompts.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import zmq

from engine.kv.events import KVEvent
from engine.kv.node import namespace_seed
from engine.plugins.hookspecs import ObserverContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

PLUGIN = "observer.kv_events"
CALLBOARD_PLUGIN = {"api": 1}

log = logging.getLogger(__name__)

MEDIUM: Final = {"device": "GPU", "host": "CPU"}
END: Final = (-1).to_bytes(8, "big", signed=True)
FEED: Final = "inproc://batches"
CLOSE_S: Final = 2.0
MOST_WAITING: Final = 100_000  # batches that the thread has not sent yet
MOST_REPLAYS: Final = 16  # peers that get old batches at once; of others the requests are dropped
AT_ONCE: Final = 512  # old batches of one peer between looks at new ones
LATER_MS: Final = 10  # until a peer that does not read is tried again


class KVEventOptions(Options, frozen=True):
    """The options of the plugin.

    endpoint, replay_endpoint: addresses to listen at; without the latter there is no replay.
    rank: of data parallelism; it is added to the ports.  buffer_steps: batches that are kept for replay.
    layout: events as 'arrays', or as 'maps' with names of fields, as vLLM has them from 0.28 on.
    hashes: 'int' for the last 64 bits of each, or 'bytes' for all 32 bytes."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None
    rank: int = 0
    buffer_steps: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    layout: Literal["arrays", "maps"] = "arrays"
    hashes: Literal["int", "bytes"] = "int"


class KVEventPublisher:
    """An observer that sends each batch of events from a thread of its own."""

    def __init__(self, page_size: int, options: KVEventOptions) -> None:
        """Listen at the endpoints.  Raises PluginError for one that cannot be used."""
        self._page_size = page_size
        self._options = options
        self._pack = msgspec.msgpack.Encoder().encode
        self._next = 0
        self._context = zmq.Context()
        self._feed = self._context.socket(zmq.PAIR)
        self._feed.set_hwm(MOST_WAITING)
        self._feed.bind(FEED)
        self._sender = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to a peer that does not read nothing is lost
        self._replay.setsockopt(zmq.MAXMSGSIZE, 64)
        self._listen(self._sender, options.endpoint)
        if options.replay_endpoint:
            self._listen(self._replay, options.replay_endpoint)
        self._thread = threading.Thread(target=self._send_all, name="kv events", daemon=True)
        self._thread.start()

    def _listen(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        base, _, port = endpoint.rpartition(":")
        address = f"{base}:{int(port) + self._options.rank}" if self._options.rank and port.isdigit() else endpoint
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PluginError(
                f"{PLUGIN}: cannot listen at {address!r}: {error}; an address is like 'tcp://127.0.0.1:5557' or "
                f"'ipc:///tmp/events'; set it in [plugins.options.'{PLUGIN}']"
            ) from error
        log.info("events of cached pages: %s", address)

    @hookimpl
    def callboard_kv_event(self, events: Sequence[KVEvent]) -> None:
        """Number the batch and pass it to the thread."""
        known = [one for event in events if (one := self._event(event)) is not None]
        if known:
            number, self._next = self._next.to_bytes(8, "big"), self._next + 1
            with suppress(zmq.Again):  # subscribers see the number that is missing
                self._feed.send_multipart((number, self._pack([time.time(), known, self._options.rank])), zmq.NOBLOCK)

    @hookimpl
    def callboard_engine_stopped(self) -> None:
        """End the thread, which sends what it has got, and free the addresses."""
        with suppress(zmq.Again):
            self._feed.send_multipart((END, b""), zmq.NOBLOCK)
        self._thread.join(CLOSE_S)
        self._feed.close(linger=0)
        if not self._thread.is_alive():  # else it ends with the process
            self._context.term()

    def _event(self, event: KVEvent) -> list[Any] | dict[str, Any] | None:
        """Return an event in vLLM's format; None for one of a kind that is not known there."""
        named: dict[str, Any] = {"block_hashes": list(map(self._hash, event.hashes))}
        if event.kind == "removed":
            named |= {"medium": MEDIUM[event.tier]}
            return self._laid_out("BlockRemoved", named)
        if event.kind not in ("stored", "restored"):
            return None
        is_first = event.parent == namespace_seed(event.namespace)
        named |= {
            "parent_block_hash": None if is_first else self._hash(event.parent),
            "token_ids": np.frombuffer(event.tokens, dtype=np.int32).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIUM[event.tier],
            "lora_name": event.namespace.adapter or None,
        }
        return self._laid_out("BlockStored", named)

    def _laid_out(self, kind: str, named: dict[str, Any]) -> list[Any] | dict[str, Any]:
        return {"type": kind, **named} if self._options.layout == "maps" else [kind, *named.values()]

    def _hash(self, digest: bytes) -> int | bytes:
        return digest if self._options.hashes == "bytes" else int.from_bytes(digest[-8:], "big")

    # ---- the thread -------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send batches and answer requests for old ones, until the end."""
        batches = self._context.socket(zmq.PAIR)
        batches.set_hwm(MOST_WAITING)
        batches.connect(FEED)
        most = self._options.buffer_steps if self._options.replay_endpoint else 0
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=most)
        replays: dict[bytes, bytes] = {}  # of a peer, the number that it gets next
        poller, topic = zmq.Poller(), (self._options.topic or "").encode()
        poller.register(batches, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        number = b""
        while number != END:
            ready = dict(poller.poll(LATER_MS if replays else None))
            if batches in ready:
                number, payload = batches.recv_multipart()
                if number != END:
                    self._sender.send_multipart((topic, number, payload))
                    kept.append((number, payload))
            elif self._replay in ready:
                match self._replay.recv_multipart():
                    case [client, b"", first] if len(first) == 8 and len(replays) < MOST_REPLAYS:
                        replays[client] = first
            else:
                for client in list(replays):
                    self._go_on(client, replays, kept)
        for one in (batches, self._sender, self._replay):
            one.close(linger=0)

    def _go_on(self, client: bytes, replays: dict[bytes, bytes], kept: deque[tuple[bytes, bytes]]) -> None:
        """Send some old batches to a peer, and the end after the last one."""
        later = [one for one in kept if one[0] >= replays[client]]
        try:
            for number, payload in later[:AT_ONCE]:
                self._replay.send_multipart((client, b"", number, payload), zmq.NOBLOCK)
                replays[client] = (int.from_bytes(number, "big") + 1).to_bytes(8, "big")
            if len(later) <= AT_ONCE:
                self._replay.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
                del replays[client]
        except zmq.Again:
            pass  # it has not read what it got
        except zmq.ZMQError:
            del replays[client]  # it is gone


@hookimpl
def callboard_observer(context: ObserverContext) -> KVEventPublisher:
    """Build the observer.  Raises PluginError for an address that cannot be used."""
    return KVEventPublisher(context.page_size, decode_options(PLUGIN, context.options, KVEventOptions))
