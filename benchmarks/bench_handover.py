"""Measures a split engine beside an undivided one, both behind the same router.

    python benchmarks/bench_handover.py --json benchmarks/results/handover_2core_cpu.json

Two engines of one thread each: as prefill and decode engine, and as two replicas that both do everything.  Clients
send prompts of which no two begin alike, at once, and stream the answers.  TTFT is the time to the first event, TPOT
that between two tokens of a stream.  A ratio below 1 is a gain of the split engine.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import numpy as np

from engine.config import Config, build_config
from server.extensions.handover.processes import LocalFleet
from server.extensions.handover.split import SplitProxy, SplitReplicas
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.router import routing
from server.http.listener import bind, url_of
from server.proxy.proxy import Proxy

DEMO = str(Path(__file__).parents[1] / "examples" / "demo_model")
WARM_UP = 2


@dataclass
class Figures:
    """The figures of one turn, in milliseconds, and tokens per second of all clients."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    tokens_per_s: float
    cached_tokens: float


@asynccontextmanager
async def serving(fleet: LocalFleet, config: Config, *, splits: bool) -> AsyncIterator[str]:
    """Give the address of a router of running engines."""
    kinds = (SplitReplicas, SplitProxy) if splits else (Replicas, Proxy)
    with bind("127.0.0.1", 0) as listener:
        async with routing(config, fleet, listener, *kinds) as replicas:
            for one in replicas.all:
                await one.settled.wait()
            yield url_of(listener)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, num_tokens: int) -> tuple[float, list[float], int]:
    """Return the time to the first token, the times between tokens, and the number of cached tokens."""
    body = {
        "model": "demo_model", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, times, cached = time.perf_counter(), [], 0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times.append(time.perf_counter())
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return times[0] - began, np.diff(times).tolist(), cached


async def turn(url: str, at_once: int, num_requests: int, num_chars: int, num_tokens: int, salt: str) -> Figures:
    """Send requests, so many at once."""
    places = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession() as session:

        async def one(number: int) -> tuple[float, list[float], int]:
            name = f"{salt}_{number}"
            line = f"def {name}(values):\n    return [{number} + one for one in values]\n\n"
            async with places:
                return await ask(session, url, (line * (num_chars // len(line) + 1))[:num_chars], num_tokens)

        await asyncio.gather(*(one(-1 - number) for number in range(WARM_UP)))
        began = time.perf_counter()
        answers = await asyncio.gather(*(one(number) for number in range(num_requests)))
        took = time.perf_counter() - began
    first = np.array([answer[0] for answer in answers]) * 1e3
    between = np.array([gap for answer in answers for gap in answer[1]]) * 1e3
    return Figures(
        ttft_p50=float(np.median(first)),
        ttft_p99=float(np.percentile(first, 99)),
        tpot_p50=float(np.median(between)),
        tpot_p99=float(np.percentile(between, 99)),
        tokens_per_s=num_requests * num_tokens / took,
        cached_tokens=float(np.mean([answer[2] for answer in answers])),
    )


async def measure(given: argparse.Namespace) -> dict[str, object]:
    """Return the figures of both, turn by turn."""
    config = build_config(
        Config(), {"model": {"path": given.model}, "device": {"threads": 1}, "kv": {"page_size": 16, "num_pages": 4096}}
    )
    found: dict[str, list[Figures]] = {"split": [], "undivided": []}
    fleet = LocalFleet(config, 2)
    try:
        for number in range(given.turns):
            for name, figures in found.items():
                async with serving(fleet, config, splits=name == "split") as url:
                    salt = f"{name[:1]}{number}"
                    figures.append(await turn(url, given.at_once, given.requests, given.chars, given.tokens, salt))
                    print(f"{name:10} {figures[-1]}", flush=True)
    finally:
        fleet.close()
    medians = {
        name: {key: float(np.median([asdict(one)[key] for one in figures])) for key in asdict(figures[0])}
        for name, figures in found.items()
    }
    ratios = {key: medians["split"][key] / value for key, value in medians["undivided"].items() if value}
    arguments = {**vars(given), "model": Path(given.model).name}
    return {"arguments": arguments, "medians": medians, "split / undivided": ratios}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--chars", type=int, default=2500)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    result = asyncio.run(measure(given))
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
