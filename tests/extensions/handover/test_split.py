"""A split engine for real: its processes are killed and stopped, and every answer is that of an undivided engine."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from server.extensions.handover.processes import LocalFleet
from server.extensions.handover.split import SplitProxy, SplitReplicas
from server.extensions.replicas.router import routing
from server.http.listener import bind, url_of
from server.proxy.replica import State
from tests.pace import far

pytestmark = pytest.mark.slow
DEMO = str(Path(__file__).parents[3] / "examples" / "demo_model")
PROMPTS = [f"def step_{number}(values):\n    return [one + {number} for one in values]\n\n" * 8 for number in range(6)]
NUM_TOKENS = 48
KEY = "the operator of these tests"
CONFIG = {
    "server": {"operator_key": KEY},
    "model": {"path": DEMO},
    "device": {"threads": 1},
    "kv": {"page_size": 16, "num_pages": 256},
    "plugins": {"options": {"transfer.shared_memory": {"timeout_s": 2.0, "lease_s": 2.0, "ring_mb": 8}}},
}


@cache
def expected() -> list[str]:
    """The texts of an undivided engine."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(DEMO, progress=False, config={"kv": CONFIG["kv"], "device": CONFIG["device"]}) as llm:
        return [llm.generate([prompt], params)[0].text for prompt in PROMPTS]


class Split:
    """One prefill engine, two that answer, their router, and its clients."""

    def __init__(self, fleet: LocalFleet, replicas: SplitReplicas, url: str, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.replicas = replicas
        self.url = url
        self.session = session

    def pid(self, number: int) -> int:
        return self.fleet._processes[number].pid

    async def ready(self, *numbers: int) -> None:
        async with asyncio.timeout(far(240)):
            while any(self.replicas.all[number].state is not State.READY for number in numbers):
                await asyncio.sleep(0.1)

    async def ask(self, prompt: str) -> tuple[str, int]:
        """Return the text and the number of cached tokens of a streamed answer."""
        body = {
            "model": "demo_model",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, cached = "", -1
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    if event.get("usage"):
                        cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return text, cached

    async def ask_all(self) -> None:
        """Check the answers to all prompts, at once."""
        async with asyncio.timeout(far(120)):
            answers = await asyncio.gather(*(self.ask(prompt) for prompt in PROMPTS))
        assert [text for text, _ in answers] == expected()

    async def until_nothing_is_held(self) -> None:
        """Wait until no engine uses a page; what is lent, too, is in use."""
        async with asyncio.timeout(far(60)):
            for replica in self.replicas.all:
                while replica.state is State.READY:
                    headers = {**self.fleet.headers, "Authorization": f"Bearer {KEY}"}
                    async with self.session.get(f"{replica.url}/stats", headers=headers) as answer:
                        pages = (await answer.json())["pages"]
                    if not pages["used"]:
                        break
                    await asyncio.sleep(0.2)


@asynccontextmanager
async def split() -> AsyncIterator[Split]:
    config = build_config(Config(), CONFIG)
    fleet = LocalFleet(config, 3)
    try:
        with bind("127.0.0.1", 0) as listener:
            url = url_of(listener)
            async with (
                routing(config, fleet, listener, SplitReplicas, SplitProxy) as replicas,
                aiohttp.ClientSession() as session,
            ):
                assert isinstance(replicas, SplitReplicas)
                yield Split(fleet, replicas, url, session)
    finally:
        fleet.close()


async def test_whatever_is_killed_or_stopped_every_answer_is_that_of_an_undivided_engine() -> None:
    expected()
    async with split() as running:
        await running.ready(0, 1, 2)
        text, cached = await running.ask(PROMPTS[0])
        assert text == expected()[0]
        assert cached >= 64, "the pages of the prompt came from the engine that computed it"
        await running.ask_all()

        for victim in (0, 1, 2):  # the engine that computes prompts, and both that answer
            asking = asyncio.ensure_future(running.ask_all())
            await asyncio.sleep(0.05)
            os.kill(running.pid(victim), signal.SIGKILL)
            await asking
            await running.ready(0, 1, 2)

        asking = asyncio.ensure_future(running.ask_all())
        await asyncio.sleep(0.02)
        os.kill(running.pid(0), signal.SIGSTOP)
        await asking
        os.kill(running.pid(0), signal.SIGCONT)
        await running.ready(0, 1, 2)
        await running.ask_all()
        await running.until_nothing_is_held()


async def test_the_streams_of_an_engine_that_is_drained_go_on_elsewhere_at_once() -> None:
    expected()
    async with split() as running:
        await running.ready(0, 1, 2)
        asking = asyncio.ensure_future(running.ask_all())
        while not running.replicas.all[1].num_open:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(running.replicas.drain(running.replicas.all[1]))
        await asking
        assert running.replicas.num_resumed
        await draining
        assert running.replicas.all[1].state is State.STOPPED
        await running.until_nothing_is_held()
