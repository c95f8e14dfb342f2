"""Events of cached pages on ZeroMQ, read by a subscriber that knows vLLM's documentation alone."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.config import Config, build_config
from engine.control.system import System
from engine.features.host_tier.tree import TieredTree
from engine.host.memory import resident_bytes
from engine.kv.events import KVEvent
from engine.kv.node import SHARED, Namespace, namespace_seed
from engine.plugins.hookspecs import ObserverContext
from engine.plugins.observer.kv_events import KVEventPublisher, callboard_observer
from engine.plugins.testing.observer import check_observer
from engine.types.errors import PluginError
from engine.types.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.pace import far

PAGE = 16


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list["Stored | Removed | Cleared"]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Subscriber:
    """What an engine keeps, by its events.  tokens: of each page by medium and hash.  parents: by hash."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.SUB)
        self._messages.setsockopt(zmq.SUBSCRIBE, b"")
        self._messages.connect(endpoint)
        self._old = self._context.socket(zmq.DEALER)  # a REQ socket takes one answer alone
        self._old.connect(replay_endpoint)
        for one in (self._messages, self._old):
            one.setsockopt(zmq.RCVTIMEO, int(1000 * far(10.0)))
        self._decode = msgspec.msgpack.Decoder(Batch).decode
        self.next = 0
        self.tokens: dict[tuple[str | None, int], list[int]] = {}
        self.parents: dict[int, int | None] = {}

    def catch_up(self) -> None:
        """Request all batches from the next one on."""
        self._old.send_multipart((b"", self.next.to_bytes(8, "big")))
        _, number, payload = self._old.recv_multipart()
        while int.from_bytes(number, "big", signed=True) >= 0:
            self.take(int.from_bytes(number, "big"), payload)
            _, number, payload = self._old.recv_multipart()

    def listen(self) -> None:
        """Wait a little for a batch; request those that were missed."""
        if not self._messages.poll(50):
            return
        _, number, payload = self._messages.recv_multipart()
        if int.from_bytes(number, "big") > self.next:
            self.catch_up()
        else:
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next
        self.next += 1
        for event in self._decode(payload).events:
            match event:
                case Stored():
                    parent = event.parent_block_hash
                    for index, one in enumerate(event.block_hashes):
                        first = index * event.block_size
                        self.tokens[event.medium, one] = event.token_ids[first : first + event.block_size]
                        self.parents[one], parent = parent, one
                case Removed():
                    for one in event.block_hashes:
                        del self.tokens[event.medium, one]
                case Cleared():
                    self.tokens.clear()

    def prefix(self, one: int) -> list[int]:
        """The tokens up to the end of a page."""
        parent = self.parents[one]
        return [*(self.prefix(parent) if parent is not None else []), *self.tokens["GPU", one]]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}


@pytest.fixture
def subscriber(endpoints: dict[str, str]) -> Iterator[Subscriber]:
    one = Subscriber(**endpoints)
    yield one
    one.close()


@pytest.fixture
def publish(endpoints: dict[str, str]) -> Iterator[Callable[..., KVEventPublisher]]:
    made: list[KVEventPublisher] = []

    def new(**options: Any) -> KVEventPublisher:
        made.append(callboard_observer(ObserverContext(4, {**endpoints, **options})))
        return made[-1]

    yield new
    for one in made:
        one.callboard_engine_stopped()


def stored(number: int, parent: bytes = b"", namespace: Namespace = SHARED) -> KVEvent:
    above = parent or namespace_seed(namespace)
    return KVEvent("stored", "device", namespace, above, (bytes([number]) * 32,), bytes(range(16)))


@pytest.mark.parametrize("num_host_pages", [0, 40])
async def test_a_subscriber_knows_every_page_of_an_engine(
    num_host_pages: int, tmp_path: Path, endpoints: dict[str, str], subscriber: Subscriber
) -> None:
    checkpoint = save(build("qwen3-tied"), tmp_path / "checkpoint")
    tables = {
        "model": {"path": str(checkpoint), "tokenizer": "none"},
        "kv": {"num_pages": 24, "page_size": PAGE, "num_host_pages": num_host_pages},
        "plugins": {"observers": ["kv_events"], "options": {"observer.kv_events": endpoints}},
    }
    system = System(build_config(Config(), tables))
    await system.start()
    try:
        shared = random_tokens(40, 99)
        for number in [*range(12), 4, 11]:  # more than the pool holds; the last two come back from the host
            prompt = [*shared, *random_tokens(60, number)]
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            await system.ingress.open(prompt, params).collect()
        subscriber.catch_up()
        planner = system.monitor._scheduler.planner
        assert planner is not None
        tree = planner.pages.tree
        known = {
            (medium, int.from_bytes(one[-8:], "big"))
            for node in tree._all_nodes()
            for medium, pages in (("GPU", node.pages), ("CPU", node.host_pages))
            if pages
            for one in node.page_hashes
        }
        assert subscriber.tokens.keys() == known
        media = [medium for medium, _ in known]
        assert media.count("GPU") == tree.num_cached
        assert media.count("CPU") == (tree.host.num_used if isinstance(tree, TieredTree) else 0)
        assert ("CPU" in media) == bool(num_host_pages)
        assert any(subscriber.prefix(one)[:32] == shared[:32] for _, one in subscriber.tokens)
    finally:
        await system.stop(drain_timeout_s=1)


def test_batches_that_were_missed_come_again(publish: Callable[..., KVEventPublisher], subscriber: Subscriber) -> None:
    publisher = publish(buffer_steps=200)
    for number in range(202):
        publisher.callboard_kv_event([stored(number)])
    subscriber.next = 2  # the first two are gone
    subscriber.catch_up()
    assert subscriber.next == 202
    # The subscription arrives later than the first batch, which is then missed; a buffer of 3 may have lost it by then.
    while subscriber.next < 204:
        publisher.callboard_kv_event([stored(210), stored(211, bytes([210]) * 32)])
        subscriber.listen()
    assert subscriber.parents[int.from_bytes(bytes([211]) * 8, "big")] == int.from_bytes(bytes([210]) * 8, "big")
    assert subscriber.parents[int.from_bytes(bytes([210]) * 8, "big")] is None


def test_maps_and_whole_hashes(publish: Callable[..., KVEventPublisher], endpoints: dict[str, str]) -> None:
    publisher = publish(layout="maps", hashes="bytes", topic="kv", rank=0)
    with zmq.Context() as context, context.socket(zmq.SUB) as messages:
        messages.setsockopt(zmq.SUBSCRIBE, b"kv")
        messages.setsockopt(zmq.RCVTIMEO, int(1000 * far(10.0)))
        messages.connect(endpoints["endpoint"])
        removed = KVEvent("removed", "host", SHARED, b"", (bytes(32),), b"")
        deadline = time.monotonic() + far(10.0)
        while not messages.poll(20):  # a subscription arrives a little later
            assert time.monotonic() < deadline
            publisher.callboard_kv_event([removed, stored(3, namespace=Namespace("", "adapter"))])
        topic, _, payload = messages.recv_multipart()
    _, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank) == (b"kv", 0)
    assert events[0] == {"type": "BlockRemoved", "block_hashes": [bytes(32)], "medium": "CPU"}
    assert events[1]["lora_name"] == "adapter"
    assert events[1]["block_hashes"] == [bytes([3]) * 32]
    assert events[1]["token_ids"] == [0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C]


def test_a_foreign_request_is_left_alone(
    publish: Callable[..., KVEventPublisher], endpoints: dict[str, str], subscriber: Subscriber
) -> None:
    publisher = publish()
    publisher.callboard_kv_event([stored(0)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.setsockopt(zmq.LINGER, 0)
        foreign.connect(endpoints["replay_endpoint"])
        for frames in ([b"x"], [b"", b"1234567"], [b"", b"12345678", b""], [b""]):
            foreign.send_multipart(frames)
        subscriber.catch_up()
    assert subscriber.next == 1


def test_a_peer_that_does_not_read_costs_no_memory_and_no_other(
    publish: Callable[..., KVEventPublisher], endpoints: dict[str, str], subscriber: Subscriber
) -> None:
    publisher = publish(buffer_steps=3000)
    for number in range(3000):
        publisher.callboard_kv_event([stored(number % 256)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.set_hwm(1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.connect(endpoints["replay_endpoint"])
        before = resident_bytes(os.getpid())
        for _ in range(300):
            with suppress(zmq.Again):
                deaf.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
            time.sleep(0.001)
        subscriber.catch_up()
        assert subscriber.next == 3000
        assert resident_bytes(os.getpid()) - before < 30 << 20


def test_an_address_in_use_is_an_error_and_ranks_have_ports_of_their_own(
    publish: Callable[..., KVEventPublisher],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PluginError, match=rf"cannot listen at 'tcp://127.0.0.1:{port}': Address already in use"):
            publish(endpoint=f"tcp://127.0.0.1:{port - 1}", rank=1)
    with pytest.raises(PluginError, match="options: endpoint, replay_endpoint"):
        publish(port=1)
    with pytest.raises(PluginError, match="buffer_steps"):
        publish(buffer_steps=-1)


def test_the_kit_finds_nothing(tmp_path: Path) -> None:
    numbers = iter(range(1000))
    check_observer(lambda: callboard_observer(ObserverContext(16, {"endpoint": f"ipc://{tmp_path}/{next(numbers)}"})))
