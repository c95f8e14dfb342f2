"""The turnstile lets one request in on each turn of the event loop, so that tokens wait for at most one of them."""

import asyncio
import itertools

import pytest

from server.http.turnstile import Turnstile, network_of
from tests.server.http_client import ask
from tests.server.live_server import LiveServer


async def test_tokens_go_out_between_any_two_requests() -> None:
    turnstile, order = Turnstile(), []

    async def request(number: int) -> None:
        await turnstile.enter("one")
        order.append(number)

    async def tokens() -> None:
        while len(order) < 16 + order.count(-1):
            order.append(-1)
            await asyncio.sleep(0)

    await asyncio.gather(tokens(), *(request(number) for number in range(16)))
    assert [number for number in order if number >= 0] == list(range(16))
    requests = [at for at, number in enumerate(order) if number >= 0]
    assert all(later - at > 1 for at, later in itertools.pairwise(requests)), order


async def test_a_request_whose_client_has_left_takes_no_turn() -> None:
    turnstile, entered = Turnstile(), []

    async def request(number: int) -> None:
        await turnstile.enter("one")
        entered.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel(), tasks[2].cancel()
    await asyncio.wait(tasks)
    assert entered == [0, 3]
    await asyncio.wait_for(turnstile.enter("one"), 1)


async def test_addresses_take_turns_however_many_requests_one_of_them_sends() -> None:
    turnstile, entered = Turnstile(), []

    async def request(address: str) -> None:
        await turnstile.enter(address)
        entered.append(address)

    await asyncio.gather(*(request(address) for address in ["many"] * 50 + ["good", "other", "good"]))
    assert entered[:5] == ["many", "many", "good", "other", "many"], "the first one had not to wait"
    assert entered[5] == "good"
    assert entered.count("many") == 50
    assert not turnstile._waiting


async def test_the_addresses_of_one_client_of_ipv6_have_one_turn() -> None:
    turnstile, entered = Turnstile(), []

    async def request(address: str) -> None:
        await turnstile.enter(address)
        entered.append(address)

    many = [f"2001:db8::{number:x}" for number in range(8)]
    others = ["2001:db8:0:1::1", "::ffff:192.0.2.1", "::ffff:192.0.2.2", "fe80::1%lo"]
    await asyncio.gather(*(request(address) for address in [*many, *others]))
    assert entered[:6] == [*many[:2], *others], "the first one had not to wait"


@pytest.mark.parametrize(
    "address, network",
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1::77", "2001:db8:0:1::/64"),
        ("fe80::1%lo", "fe80::/64"),
        ("::1", "::1"),
        ("-", "-"),
    ],
)
def test_what_counts_as_one_client(address: str, network: str) -> None:
    assert network_of(address) == network


def test_every_request_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    enter = Turnstile.enter

    async def counted(turnstile: Turnstile, address: str) -> None:
        passed.append(address)
        await enter(turnstile, address)

    monkeypatch.setattr(Turnstile, "enter", counted)
    with LiveServer() as live:
        for _ in range(3):
            assert ask(live.port, "GET", "/health").status == 200
    assert passed == ["127.0.0.1"] * 3
