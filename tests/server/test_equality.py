"""The same requests give the same texts whoever else is served, however prompts are cut, whatever is cached."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.config import Config, build_config
from tests.figures import Figure
from tests.server.live_system import MODEL, LiveSystem

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
STEM = "def parse(line, separator, default=None):\n    '''Splits a line of text into its fields.'''\n"
WORDS = ["count", "index", "name", "value", "list", "of", "the", "each"]


class Engine(NamedTuple):
    """One to be asked.  concurrencies: how many requests at a time, each on an empty cache and then on a full one."""

    num_pages: int
    scheduler: dict[str, int]
    concurrencies: tuple[int, ...]


class Answers(NamedTuple):
    """texts: in the order of the requests.  num_cached: prompt tokens that did not have to be computed."""

    texts: list[str]
    num_cached: int


IN_CHUNKS = {"prefill_chunk": 5, "max_step_tokens": 96}
ROOMY = 4096
ENGINES = {
    "prompts as a whole": Engine(ROOMY, {}, (1, 8, 64)),
    "prompts in chunks of 5": Engine(ROOMY, IN_CHUNKS, (1, 8, 64)),
    "chunks, and pages for a tenth of them": Engine(400, IN_CHUNKS, (64,)),
}
FEW = {
    "prompts as a whole": Engine(ROOMY, {}, (8,)),
    "chunks, and pages for a tenth of them": Engine(100, IN_CHUNKS, (32,)),
}


def configured(engine: Engine) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": engine.num_pages, "page_size": 4},
        "scheduler": {"max_running": 64, **engine.scheduler},
    }
    return build_config(Config(), tables)


def requests(count: int) -> list[dict[str, Any]]:
    """Long and short, greedy and seeded; half of them begin alike."""
    made = []
    for number in range(count):
        words = " ".join(random.Random(number).choices(WORDS, k=1 + number % 23))
        made.append(
            {
                "prompt": f"{STEM if number % 2 else ''}# {number}: {words}\n",
                "max_tokens": 4 + number % 13,
                "temperature": 0.0 if number % 3 else 0.9,
                "top_k": 0 if number % 4 else 8,
                "seed": number,
            }
        )
    return made


def answers(live: LiveSystem, num_requests: int, concurrency: int) -> Answers:
    """In an order of its own, and with a cache of its own, which a salt is."""
    asked = [{**fields, "cache_salt": str(concurrency)} for fields in requests(num_requests)]
    order = list(range(num_requests))
    random.Random(concurrency).shuffle(order)
    texts, num_cached = [""] * num_requests, 0
    for index, reply in zip(order, live.complete_all([asked[index] for index in order], concurrency), strict=True):
        assert reply.status == 200, reply
        texts[index] = reply.json["choices"][0]["text"]
        num_cached += reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answers(texts, num_cached)


@pytest.mark.slow
@pytest.mark.reliability("H6", "200 requests in 14 ways: alone or 8 or 64 at once, cached or not, in chunks or not")
def test_company_order_chunks_and_cache_change_nothing(figure: Figure, at_full_size: bool) -> None:
    num_requests, engines = (200, ENGINES) if at_full_size else (60, FEW)
    with LiveSystem(configured(ENGINES["prompts as a whole"])) as live:
        alone = answers(live, num_requests, 1).texts
    assert len(set(alone)) > num_requests // 2
    num_texts, different, most_cached = 0, set(), 0
    for name, engine in engines.items():
        with LiveSystem(configured(engine)) as live:
            for concurrency in engine.concurrencies:
                first, again = (answers(live, num_requests, concurrency) for _ in range(2))
                for found in (first, again):
                    num_texts += num_requests
                    pairs = enumerate(zip(alone, found.texts, strict=True))
                    different |= {(name, concurrency, index) for index, (one, other) in pairs if one != other}
                if engine.num_pages == ROOMY:
                    assert again.num_cached > 2 * first.num_cached, "what is asked again is cached"
                    most_cached = again.num_cached
                else:
                    assert again.num_cached < most_cached, "pages were not scarce"
    assert not different
    figure("texts compared", num_texts, "", at_least=2800 if at_full_size else 240)
    figure("texts that differ", len(different), "", at_most=0)
