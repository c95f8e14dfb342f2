"""The same requests give the same tokens whoever else is served, however prompts are cut, whatever is cached."""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config
from tests.models.checkpoints import build, random_tokens, save
from tests.server.live_system import MODEL, LiveSystem

NUM_REQUESTS = 60
BY_ID = {"logprobs": 0}  # without a tokenizer, tokens are seen only there


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


def configured(checkpoint: Path, **scheduler: int) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 512, "page_size": 4},
        "scheduler": {"max_running": 16, **scheduler},
    }
    return build_config(Config(), tables)


def requests() -> list[dict[str, Any]]:
    """Long and short, greedy and seeded; half of them begin alike."""
    made = []
    for number in range(NUM_REQUESTS):
        shared = random_tokens(24, 0) if number % 2 else []
        made.append(
            {
                "prompt": [*shared, *random_tokens(2 + number % 37, number)],
                "max_tokens": 4 + number % 13,
                "temperature": 0.0 if number % 3 else 0.9,
                "seed": number,
                **BY_ID,
            }
        )
    return made


def token_logprobs(live: LiveSystem, concurrency: int, order: list[int]) -> list[list[float]]:
    asked = requests()
    replies = live.complete_all([asked[index] for index in order], concurrency)
    found: list[list[float]] = [[] for _ in asked]
    for index, reply in zip(order, replies, strict=True):
        assert reply.status == 200, reply
        found[index] = reply.json["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_company_order_chunks_and_cache_change_nothing(checkpoint: Path) -> None:
    order = list(range(NUM_REQUESTS))
    with LiveSystem(configured(checkpoint)) as live:
        alone = token_logprobs(live, 1, order)
        again = token_logprobs(live, 16, order)  # all of it cached
    assert_same(alone, again)
    random.Random(1).shuffle(order)
    with LiveSystem(configured(checkpoint, prefill_chunk=5, max_step_tokens=24)) as live:
        assert_same(alone, token_logprobs(live, 32, order))


def assert_same(one: list[list[float]], other: list[list[float]]) -> None:
    """Another token would have another log probability; the last digits depend on a matrix product's shape."""
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        assert left == pytest.approx(right, abs=1e-3), f"request {index}"
