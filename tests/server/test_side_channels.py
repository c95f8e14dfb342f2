"""What time and counters tell a client about keys and about the prompts of others."""

import asyncio
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from engine.config import Config, build_config
from engine.errors import RequestError
from server.auth import require_key
from tests.models.checkpoints import build, random_tokens, save
from tests.server.live_system import MODEL, LiveSystem

KEYS = ["first-" + "k" * 58, "other-" + "k" * 58]
NUM_SAMPLES = 1000


def test_how_long_a_wrong_key_takes_says_nothing_about_the_right_one() -> None:
    check = require_key(KEYS)

    async def handler(request: object) -> web.Response:
        raise AssertionError("a wrong key was let through")

    async def measure() -> dict[str, list[int]]:
        guesses = {"nothing right": "x" * 64, "all but the last": KEYS[0][:-1] + "x", "second": KEYS[1][:-1] + "x"}
        times: dict[str, list[int]] = {name: [] for name in guesses}
        for _ in range(NUM_SAMPLES):
            for name, key in guesses.items():
                route = SimpleNamespace(resource=None)
                headers = {"Authorization": f"Bearer {key}"}
                request: Any = SimpleNamespace(match_info=SimpleNamespace(route=route), headers=headers)
                started = time.perf_counter_ns()
                try:
                    await check(request, handler)  # type: ignore[arg-type]
                except RequestError:
                    times[name].append(time.perf_counter_ns() - started)
        return times

    times = asyncio.run(measure())
    assert all(len(samples) == NUM_SAMPLES for samples in times.values())
    base = times["nothing right"]
    deviation = statistics.median(abs(sample - statistics.median(base)) for sample in base)
    for name, samples in times.items():
        assert abs(statistics.median(samples) - statistics.median(base)) < 3 * max(deviation, 100), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def test_one_clients_prompts_are_in_nobody_elses_cache(checkpoint: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 512, "page_size": 4},
        "server": {"api_key": KEYS},
    }
    with LiveSystem(build_config(Config(), tables)) as live:

        def cached(key: str, prompt: list[int], **fields: Any) -> int:
            reply = live.complete(prompt, {"Authorization": f"Bearer {key}"}, max_tokens=1, **fields)
            tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        for number in range(20):
            prompt = random_tokens(40, number)
            assert cached(KEYS[0], prompt) == 0
            assert cached(KEYS[0], prompt) == 36  # all whole pages but the one that must be computed
            assert cached(KEYS[1], prompt) == 0
            assert cached(KEYS[0], prompt, cache_salt="mine") == 0
