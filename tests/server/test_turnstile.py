"""The turnstile lets one request in on each turn of the event loop, so that tokens wait for at most one of them."""

import asyncio
import itertools

import pytest

from server.http.turnstile import Turnstile
from tests.server.http_client import ask
from tests.server.live_server import LiveServer


async def test_tokens_go_out_between_any_two_requests() -> None:
    turnstile, order = Turnstile(), []

    async def request(number: int) -> None:
        await turnstile.enter()
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
        await turnstile.enter()
        entered.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel(), tasks[2].cancel()
    await asyncio.wait(tasks)
    assert entered == [0, 3]
    await asyncio.wait_for(turnstile.enter(), 1)


def test_every_request_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Turnstile] = []
    enter = Turnstile.enter

    async def counted(turnstile: Turnstile) -> None:
        passed.append(turnstile)
        await enter(turnstile)

    monkeypatch.setattr(Turnstile, "enter", counted)
    with LiveServer() as live:
        for _ in range(3):
            assert ask(live.port, "GET", "/health").status == 200
    assert len(passed) == 3
