"""Over TCP as over anything else, nobody gets in without a key that is known."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from engine.messages import Step, StepDone
from engine.workers.keys import Authenticator, ClientKeys, KeyPair
from engine.workers.link import SocketLink
from engine.workers.messages import FromWorker, WorkerAlive
from tests.pace import far

TCP = "tcp://127.0.0.1:0"


class Host:
    """A server with one known client."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.server, self.client = KeyPair.draw(), KeyPair.draw()
        self.authenticator = Authenticator(self.context)
        self.authenticator.admit("executor0", frozenset((self.client.public,)))
        self.messages: list[Any] = []
        self.link: SocketLink[StepDone | FromWorker] = SocketLink(
            "executor0", self.context, StepDone | FromWorker, self.messages.append, capacity=8
        )
        self.endpoint = self.link.bind(TCP, self.server)

    def knock(self, keys: ClientKeys, context: zmq.Context) -> tuple[SocketLink[Any], list[Any]]:
        arrived: list[Any] = []
        link: SocketLink[Any] = SocketLink("engine", context, Step, arrived.append, capacity=8)
        link.connect(self.endpoint, keys)
        link.put(WorkerAlive(waiting=0))
        return link, arrived

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(far(5)):
            while not condition():
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.link.close()
        self.authenticator.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def host_and_elsewhere() -> AsyncIterator[tuple[Host, zmq.Context]]:
    host, elsewhere = Host(), zmq.Context()
    try:
        yield host, elsewhere
    finally:
        elsewhere.destroy(linger=0)
        host.close()


async def test_a_known_key_gets_in() -> None:
    async with host_and_elsewhere() as (host, elsewhere):
        link, arrived = host.knock(ClientKeys(host.client, host.server.public), elsewhere)
        await host.wait_for(lambda: bool(host.messages))
        host.link.put(Step(step_id=3))
        await host.wait_for(lambda: arrived == [Step(step_id=3)])
        link.close()
        assert host.authenticator.num_refused == 0


async def test_keys_are_derived_alike_by_all_who_share_the_secret_and_by_nobody_else() -> None:
    """And a client whose server key is another secret's does not even get to say who it is."""
    own = KeyPair.derive("the secret", "link 1")
    assert own == KeyPair.derive("the secret", "link 1")
    others = [KeyPair.derive("the secret", "link 2"), KeyPair.derive("another secret", "link 1")]
    assert len({own.public, own.secret, *(one.public for one in others), *(one.secret for one in others)}) == 6
    assert zmq.curve_public(own.secret) == own.public

    async with host_and_elsewhere() as (host, elsewhere):
        stranger, arrived = host.knock(ClientKeys(host.client, own.public), elsewhere)
        failed = host.link._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        await host.wait_for(lambda: bool(failed.poll(0)))
        failed.close()
        host.link._socket.disable_monitor()
        stranger.close()
        link, _ = host.knock(ClientKeys(host.client, host.server.public), elsewhere)
        await host.wait_for(lambda: bool(host.messages))
        assert (host.messages, arrived) == ([WorkerAlive(waiting=0)], [])
        link.close()


@pytest.mark.reliability("P14", "no key, an unknown key, the key of another server")
async def test_an_unknown_key_is_refused_and_the_known_one_still_gets_in(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with host_and_elsewhere() as (host, elsewhere):
            stranger, _ = host.knock(ClientKeys(KeyPair.draw(), host.server.public), elsewhere)
            await host.wait_for(lambda: host.authenticator.num_refused > 0)
            assert not host.messages
            link, _ = host.knock(ClientKeys(host.client, host.server.public), elsewhere)
            await host.wait_for(lambda: bool(host.messages))
            stranger.close(), link.close()
    assert any(record.getMessage().startswith("link executor0: a client without") for record in caplog.records)


@pytest.mark.reliability("P14", "no key, an unknown key, the key of another server")
@pytest.mark.parametrize("how", ["no keys at all", "another server's key"])
async def test_who_cannot_shake_hands_never_reaches_the_link(how: str) -> None:
    async with host_and_elsewhere() as (host, elsewhere):
        bare = elsewhere.socket(zmq.PAIR)
        bare.linger = 0
        if how == "another server's key":
            bare.curve_publickey, bare.curve_secretkey = host.client.public, host.client.secret
            bare.curve_serverkey = KeyPair.draw().public
        events = bare.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        bare.connect(host.endpoint)
        bare.send(b"\x91\xabWorkerAlive")
        await host.wait_for(lambda: bool(events.poll(0)))
        assert int.from_bytes(events.recv_multipart()[0][:2], "little") == zmq.EVENT_DISCONNECTED
        bare.disable_monitor()
        events.close(), bare.close()
        assert not host.messages
