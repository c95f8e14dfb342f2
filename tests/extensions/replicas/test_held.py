"""The blocks that a replica holds: reported when they are computed, and when their pages go."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from engine.config import Config
from engine.messages import Admit
from engine.types.params import SamplingParams
from server.extensions.replicas.held import HELD, PATH, HeldPrompts, blocks_part, reporting
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.router import routing
from server.extensions.replicas.secret import FleetSecret, require_secret
from server.http.listener import bind
from server.proxy.affinity import HeldBlocks, PrefixAffinity
from server.proxy.replica import State
from tests.pace import far
from tests.scheduling.bench import Bench, prompt_of
from tests.server.engine_server import EngineServer
from tests.server.http_client import as_operator, ask

LONG = "the quick brown fox jumps over the lazy dog. " * 12


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def report(held: HeldPrompts, since: HeldBlocks | None = None) -> HeldBlocks:
    return held.report("", 0) if since is None else held.report(since.epoch, since.version)


def bench_with(held: HeldPrompts, **limits: Any) -> Bench:
    bench = Bench(depth=1, page_size=4, **limits)
    bench.planner._events.install([bench.planner.requests.meter, bench.timelines, held])
    return bench


def run(bench: Bench, number: int, prompt: np.ndarray, blocks: list[bytes]) -> None:
    bench.streams[number], bench.ends[number] = [], []
    params = SamplingParams(temperature=0.0, max_tokens=1)
    ids = np.asarray(prompt, np.int32).tobytes()
    bench.planner.admit(Admit(request_id=number, token_ids=ids, params=params, parts=blocks_part(blocks)))
    bench.finish()


def test_blocks_are_held_from_the_first_token_until_their_pages_go() -> None:
    held = HeldPrompts()
    bench = bench_with(held, num_pages=8, max_len=32)
    run(bench, 1, prompt_of(16), [block(1), block(2), block(3)])
    first = report(held)
    assert (first.is_whole, set(first.gained)) == (True, {block(1), block(2), block(3)})
    assert report(held, first) == HeldBlocks(first.epoch, first.version, False, [], [])
    run(bench, 2, prompt_of(24, seed=2), [block(4)])  # takes the last pages of the first prompt
    second = report(held, first)
    assert (second.is_whole, second.gained) == (False, [block(4)])
    assert block(3) in second.lost
    assert block(1) not in second.lost, "its page is the first one, which goes last"
    whole = PrefixAffinity()
    whole.learn("a", first)
    whole.learn("a", second)
    assert whole._held["a"] == set(report(held).gained)
    run(bench, 3, prompt_of(30, seed=3), [])
    assert set(report(held, second).lost) == {block(1), block(4)}
    bench.planner.restart(is_fault=False)
    assert report(held, second).is_whole, "the cache is empty, so nothing that was known before holds"
    assert report(held).gained == []


class TwoEngines:
    """A ``Fleet`` of two engines that several routers send requests to."""

    size = 2

    def __init__(self, served: list[EngineServer], headers: dict[str, str]) -> None:
        self._served = served
        self.headers = headers

    async def url(self, number: int) -> str:
        return self._served[number].url

    async def is_running(self, number: int) -> bool:
        return False

    async def stop(self, number: int) -> None: ...

    async def start(self, number: int) -> None: ...

    def close(self) -> None: ...


async def until(condition: Any) -> None:
    async with asyncio.timeout(far(20)):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_two_routers_know_the_same_and_one_that_starts_knows_it_too() -> None:
    engines = [EngineServer(model={"name": "demo"}, kv={"num_pages": 160, "page_size": 8}) for _ in range(2)]
    secret = FleetSecret()
    async with AsyncExitStack() as stack:
        for engine in engines:
            held = engine.system.watchers[HELD] = HeldPrompts()
            engine.guard = reporting(held, require_secret(secret.digest))
            stack.enter_context(engine)
        fleet = TwoEngines(engines, secret.headers)

        async def router() -> tuple[Replicas, aiohttp.ClientSession]:
            listener = stack.enter_context(bind("127.0.0.1", 0))
            replicas = await stack.enter_async_context(routing(Config(), fleet, listener))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = await stack.enter_async_context(aiohttp.ClientSession(url, headers=as_operator()))
            await until(lambda: all(one.state is State.READY for one in replicas.all))
            return replicas, client

        async def cached(client: aiohttp.ClientSession, prompt: str, **fields: Any) -> int:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **fields}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
                found: int = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
                return found

        def holders(replicas: Replicas, prompt: str, **fields: Any) -> list[str]:
            blocks = replicas._affinity.blocks(msgspec.json.encode({"prompt": prompt, **fields}))
            return [name for name, held in replicas._affinity._held.items() if blocks[-1] in held]

        (one, client), (other, second) = await router(), await router()
        for number in range(4):  # each router alone would send them to either replica in turn
            prompt = f"{number} {LONG}"
            assert await cached(client, prompt) == 0
            await until(lambda prompt=prompt: holders(other, prompt))
            assert await cached(second, prompt) > 0
        late, third = await router()
        await until(lambda: all(holders(late, f"{number} {LONG}") for number in range(4)))
        assert [await cached(third, f"{number} {LONG}") > 0 for number in range(4)] == [True] * 4
        assert late.num_with_prefix == 4
        # What a replica has evicted is known to be gone.
        (name,) = holders(one, f"0 {LONG}")
        gone = engines[int(name[-1])]
        for number in range(12):
            body = {"model": "demo", "prompt": f"x{number} {LONG}", "max_tokens": 1}
            assert ask(gone.port, "POST", "/v1/completions", body, secret.headers).status == 200
        await until(lambda: not holders(one, f"0 {LONG}") and not holders(late, f"0 {LONG}"))
        assert [ask(gone.port, "GET", PATH, None, headers).status for headers in ({}, secret.headers)] == [403, 200]
