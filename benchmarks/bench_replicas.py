"""Two replicas behind the router: what keeping prefixes together saves, what a kill costs, what the router adds.

    python benchmarks/bench_replicas.py --json benchmarks/results/replicas_2core_cpu.json

The demo model, ``callboard serve --replicas 2 --on ray``.  Conversations share system prompts and grow turn by turn;
all send their next turn at once.  The same ones go through the router; straight to the replicas, to the least busy one
or by chance; and to one replica alone, whose cache sees them all.  Each run has a cache of its own, by ``cache_salt``.
Then a replica gets SIGKILL while requests are open, first in one piece, then as streams: one that is lost, or answered
with another text than undisturbed, makes this script fail.  Equal requests in turns through the router and straight to
the replicas say what the router adds.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from machine import keep, new_parser
from replica_cluster import Cluster
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

SYSTEM_PROMPTS = [
    f"You are helper number {number} of a team that writes Python. "
    + "Answer with one short function, name its arguments well, and say in a line what it returns. " * 6
    for number in range(4)
]
NOUNS = ("list", "graph", "matrix", "string", "queue", "table", "number", "tree", "file", "date", "word", "point")
TURN_TOKENS, KILL_TOKENS, STREAM_TOKENS = 16, 160, 128
NUM_KILLED_AT, NUM_STREAMS = 12, 16  # requests open when a replica is killed; streams open at once
NUM_STREAMS_KILLED_AT = 40
UNTIL_KILL_S = 0.5


class Addresses:
    """Where the next request goes: by chance with ``rng``, else to the least busy, as the router sends new prompts."""

    def __init__(self, urls: list[str], rng: random.Random | None = None) -> None:
        self._num_open = dict.fromkeys(urls, 0)
        self._num_sent = dict.fromkeys(urls, 0)
        self._rng = rng

    @contextmanager
    def busy(self) -> Iterator[str]:
        """The address, for as long as the request is open."""
        if self._rng is None:
            url = min(self._num_open, key=lambda one: (self._num_open[one], self._num_sent[one]))
        else:
            url = self._rng.choice(list(self._num_open))
        self._num_open[url] += 1
        self._num_sent[url] += 1
        try:
            yield url
        finally:
            self._num_open[url] -= 1


class Conversations:
    """The same ones whenever they are held with the same seed, but for what is answered."""

    def __init__(self, session: aiohttp.ClientSession, number: int, turns: int, seed: int) -> None:
        self._session = session
        self._number = number
        self._turns = turns
        self._seed = seed

    async def hold(self, addresses: Addresses, salt: str) -> tuple[int, int]:
        """(prompt tokens of all turns, those of them that were cached)."""
        rng = random.Random(self._seed)
        prompts = [SYSTEM_PROMPTS[index % len(SYSTEM_PROMPTS)] for index in range(self._number)]
        talks = [[{"role": "system", "content": prompt}] for prompt in prompts]
        num_prompt = num_cached = 0
        for turn in range(self._turns):
            rng.shuffle(talks)
            for talk in talks:
                asked = f"{turn}: write a function that turns a {rng.choice(NOUNS)} into a {rng.choice(NOUNS)}, "
                talk.append({"role": "user", "content": asked + f"but not in more than {rng.randrange(1000)} steps."})
            for talk, answer in zip(
                talks, await asyncio.gather(*(self._say(addresses, talk, salt) for talk in talks)), strict=True
            ):
                num_prompt += answer["usage"]["prompt_tokens"]
                num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return num_prompt, num_cached

    async def _say(self, addresses: Addresses, talk: list[dict[str, str]], salt: str) -> dict[str, Any]:
        fields = {"messages": talk, "max_tokens": TURN_TOKENS, "temperature": 0, "cache_salt": salt}
        with addresses.busy() as url:
            return await post(self._session, f"{url}/v1/chat/completions", fields)


async def post(session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The answer.  Raises ClientError for any status but 200."""
    async with session.post(url, json={"model": "callboard-demo", **fields}) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


async def hit_rates(
    cluster: Cluster, session: aiohttp.ClientSession, conversations: int, turns: int, rounds: int
) -> dict[str, Any]:
    """Cached over prompt tokens, by who chooses the replica."""
    urls = await cluster.wait_until_ready(session)
    ways: dict[str, Callable[[int], Addresses]] = {
        "router": lambda _: Addresses([cluster.url]),
        "least busy": lambda _: Addresses(urls),
        "by chance": lambda seed: Addresses(urls, random.Random(seed)),
        "one replica alone": lambda _: Addresses(urls[:1]),
    }
    totals = {way: [0, 0] for way in ways}
    for seed in range(rounds):
        for way, make in ways.items():
            held = await Conversations(session, conversations, turns, seed).hold(make(seed), f"{way} {seed}")
            totals[way] = [before + now for before, now in zip(totals[way], held, strict=True)]
    rates = {way: cached / prompt for way, (prompt, cached) in totals.items()}
    return {
        "conversations": conversations,
        "turns": turns,
        "rounds": rounds,
        "prompt_tokens": {way: prompt for way, (prompt, _) in totals.items()},
        "hit_rate": rates,
        "router_over": {way: rates["router"] / rate for way, rate in rates.items()},
        "computed_over_router": {way: (1 - rate) / (1 - rates["router"]) for way, rate in rates.items()},
    }


async def text(session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> str:
    """What an answer in one piece says."""
    answer: str = (await post(session, url, fields))["choices"][0]["text"]
    return answer


async def streamed_text(session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> str:
    """What a stream says.  Raises KeyError for one that ends with an error."""
    found = []
    async with session.post(url, json={"model": "callboard-demo", "stream": True, **fields}) as response:
        response.raise_for_status()
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if event and event != b"[DONE]":
                found.append(json.loads(event)["choices"][0]["text"])
    return "".join(found)


async def kills(
    cluster: Cluster,
    session: aiohttp.ClientSession,
    rounds: int,
    ask: Callable[[aiohttp.ClientSession, str, dict[str, Any]], Awaitable[str]],
    num_open: int,
) -> dict[str, Any]:
    """One replica each round, in the middle of so many requests."""

    async def ask_all() -> list[str | BaseException]:
        fields = {"max_tokens": KILL_TOKENS, "temperature": 0, "ignore_eos": True}
        prompts = [f"def function_{index}(value, other):\n    " for index in range(num_open)]
        url = f"{cluster.url}/v1/completions"
        asked = (ask(session, url, {"prompt": prompt, **fields}) for prompt in prompts)
        return await asyncio.gather(*asked, return_exceptions=True)

    await cluster.wait_until_ready(session)
    await ask_all()  # once for the first requests' own costs
    started = time.perf_counter()
    undisturbed = await ask_all()
    undisturbed_s = time.perf_counter() - started
    rng = random.Random(1)
    losses_before = sum(one["lost"] for one in await cluster.replicas(session))
    num_lost = num_different = num_hit = 0
    back, took = [], []
    for number in tqdm(range(rounds), desc="kills", disable=not sys.stderr.isatty()):
        started = time.perf_counter()
        asking = asyncio.create_task(ask_all())
        await cluster.wait_until(session, lambda one: one["open_requests"] > 0)
        await asyncio.sleep(rng.uniform(0, min(UNTIL_KILL_S, undisturbed_s / 2)))
        victim = (await cluster.replicas(session))[number % cluster.size]
        killed = time.perf_counter()
        cluster.kill(victim["url"])
        answers = await asking
        took.append(time.perf_counter() - started)
        num_hit += victim["open_requests"]
        num_lost += sum(isinstance(one, BaseException) for one in answers)
        num_different += sum(
            a != b for a, b in zip(answers, undisturbed, strict=True) if not isinstance(a, BaseException)
        )
        await cluster.wait_until_ready(session)
        back.append(time.perf_counter() - killed)
    losses = sum(one["lost"] for one in await cluster.replicas(session)) - losses_before
    assert losses == rounds, "the router has seen other losses"
    return {
        "kills": rounds,
        "requests": rounds * num_open,
        "requests_of_killed_replicas": num_hit,
        "requests_lost": num_lost,
        "texts_that_differ": num_different,
        "replica_is_back_s": spread(back),
        "all_answered_s": spread(took),
        "all_answered_undisturbed_s": undisturbed_s,
    }


async def added_latency(
    cluster: Cluster, session: aiohttp.ClientSession, requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds through the router and straight, in turns, so that what else the machine does hits both."""
    urls = await cluster.wait_until_ready(session)

    async def one_token(addresses: Addresses) -> float:
        started = time.perf_counter()
        with addresses.busy() as url:
            await post(session, f"{url}/v1/completions", {"prompt": "def f(x):", "max_tokens": 1, "temperature": 0})
        return time.perf_counter() - started

    async def stream(addresses: Addresses, index: int = 0) -> tuple[float, float]:
        fields = {"prompt": f"def f{index}(x):", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0}
        started = time.perf_counter()
        first = 0.0
        with addresses.busy() as url:
            async with session.post(
                f"{url}/v1/completions", json={"model": "callboard-demo", "stream": True, **fields}
            ) as response:
                response.raise_for_status()
                async for _ in response.content.iter_any():
                    first = first or time.perf_counter()
        return first - started, (time.perf_counter() - first) / STREAM_TOKENS

    async def streams(addresses: Addresses) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(stream(addresses, index) for index in range(NUM_STREAMS)))
        return (time.perf_counter() - started) / (NUM_STREAMS * STREAM_TOKENS)

    ways = {"router": [cluster.url], "straight": urls}
    request_s = await in_turns(ways, one_token, requests)
    one_stream = await in_turns(ways, stream, rounds)
    cpu_s = cluster.router_cpu_s()
    many_streams = await in_turns(ways, streams, rounds)
    cpu_s = cluster.router_cpu_s() - cpu_s
    return {
        "request of one token, s": compared(request_s),
        "first token of one stream, s": compared({way: [first for first, _ in one_stream[way]] for way in ways}),
        "each token of one stream, s": compared({way: [each for _, each in one_stream[way]] for way in ways}),
        f"each token of {NUM_STREAMS} streams, s": compared(many_streams),
        "router's processor time": {"s_per_token": cpu_s / ((rounds + 1) * NUM_STREAMS * STREAM_TOKENS)},
    }


async def in_turns(
    ways: dict[str, list[str]], measure: Callable[[Addresses], Awaitable[Any]], rounds: int
) -> dict[str, list[Any]]:
    """What was measured each way; the first round is not counted."""
    found: dict[str, list[Any]] = {way: [] for way in ways}
    addresses = {way: Addresses(urls) for way, urls in ways.items()}
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            found[way].append(await measure(addresses[way]))
    return {way: values[1:] for way, values in found.items()}


def compared(found: dict[str, list[float]]) -> dict[str, float]:
    """The least and the median of each, what the router adds to them, and the ratio of the medians.

    What else a machine does makes nothing faster: the least says the most where it is busy."""
    report = {}
    for name, pick in (("least", min), ("median", statistics.median)):
        router, straight = pick(found["router"]), pick(found["straight"])
        report |= {f"router_{name}": router, f"straight_{name}": straight, f"added_{name}": router - straight}
    return {**report, "ratio": report["router_median"] / report["straight_median"]}


def spread(values: list[float]) -> dict[str, float]:
    """Least, median, most."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one cluster."""
    with Cluster(2, arguments.pages) as cluster:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            rates = await hit_rates(cluster, session, arguments.conversations, arguments.turns, arguments.rounds)
            latency = await added_latency(cluster, session, arguments.requests, arguments.stream_rounds)
            return {
                "hit_rates": rates,
                "latency": latency,
                "kills": await kills(cluster, session, arguments.kills, text, NUM_KILLED_AT),
                "kills_of_streams": await kills(
                    cluster, session, arguments.kills, streamed_text, NUM_STREAMS_KILLED_AT
                ),
            }


def show(report: dict[str, Any]) -> None:
    """Three tables."""
    rates = report["hit_rates"]
    table = Table("who chooses", "hit rate", "router over it", "tokens computed, over router's")
    for way, rate in rates["hit_rate"].items():
        table.add_row(
            way, f"{rate:.3f}", f"{rates['router_over'][way]:.2f}", f"{rates['computed_over_router'][way]:.2f}"
        )
    Console().print(table)
    columns = [f"{way}_{name}" for name in ("least", "median") for way in ("router", "straight", "added")]
    table = Table("in ms", *(name.replace("_", " ") for name in columns), "ratio")
    for name, row in report["latency"].items():
        if "ratio" in row:
            times = (f"{row[name] * 1e3:.3f}" for name in columns)
            table.add_row(name.removesuffix(", s"), *times, f"{row['ratio']:.2f}")
    Console().print(table)
    cpu_us = report["latency"]["router's processor time"]["s_per_token"] * 1e6
    print(f"the router's processor time per streamed token: {cpu_us:.0f} us")
    for what, found in (("requests", report["kills"]), ("streams", report["kills_of_streams"])):
        back = found["replica_is_back_s"]
        print(
            f"{found['kills']} kills, {found['requests_of_killed_replicas']} of {found['requests']} {what} were there: "
            f"{found['requests_lost']} lost, {found['texts_that_differ']} texts differ; "
            f"back after {back['median']:.1f} s (most {back['max']:.1f})"
        )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="of conversations, each with another seed")
    parser.add_argument("--pages", type=int, default=8192, help="of each replica")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--requests", type=int, default=200, help="one at a time, each way")
    parser.add_argument("--stream-rounds", type=int, default=9, help="of streams, each way")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    show(report)
    keep(arguments.output, report)
    found = (report["kills"], report["kills_of_streams"])
    if any(one["requests_lost"] or one["texts_that_differ"] for one in found):
        sys.exit("a request was lost or answered with another text")


if __name__ == "__main__":
    main()
