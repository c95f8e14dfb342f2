"""The share of agents' prompt tokens that a running engine finds, and the times to first tokens, by way of eviction.

The traffic is that of ``bench_sessions.py`` with fewer tokens, which fits a small model, and many times as fast.  It
goes to the engine without HTTP, once for each way, at the times of the traffic; a turn waits for the answer to the one
before it.  The ways are lru, a time to live of 60 s that each request asks for, and leases as long as pauses take; all
times are shortened alike.  The optimum evicts the page whose next use is furthest (Belady), for one request at a time.
A run begins amid the traffic, and its first part, in which the cache fills, is not counted.  The engine and its clients
share a process and an event loop.  Four minutes with the defaults; a minute and a half with one of the ways.

    python benchmarks/bench_sessions_live.py
    python benchmarks/bench_sessions_live.py --ways lease --seconds 20
    python benchmarks/bench_sessions_live.py --model SmolLM2-135M-Instruct.Q4_1.gguf --smaller 16 --page-size 8 \
        --pages 200 --speed 3 --per-minute 0.5 --singles 30
"""

import argparse
import asyncio
import hashlib
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
from agent_traffic import BLOCK, traffic
from belady import most_found
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config, build_config
from engine.control.system import System
from engine.features.traffic.trace import DIGEST_BYTES, TracedRequest
from engine.messages import Finish, RequestOptions
from engine.types.params import SamplingParams
from engine.types.prompt import Origin, RequestPart

FIRST_TOKEN, NUM_TOKENS = 8, 256  # of which prompts are made
WAYS = ("lru", "ttl", "lease")
TTL_S, MOST_S = 60.0, 300.0  # of traffic: what each request asks for, and the longest lease
AGENTS = "agents"


@dataclass(frozen=True, slots=True)
class Sent:
    """The requests of a run.  at: seconds from its beginning.  smaller: times as few tokens.  warm_s: not counted."""

    requests: list[TracedRequest]
    at: list[float]
    smaller: int
    warm_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class Answered:
    """One counted request."""

    client: str
    num_tokens: int
    num_found: int
    ttft_s: float


@cache
def of_block(digest: bytes, num_tokens: int) -> tuple[int, ...]:
    """Tokens for a block of the trace: equal blocks have equal ones."""
    seed = int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "big")
    drawn = np.random.default_rng(seed).integers(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS, num_tokens)
    return tuple(drawn.tolist())


def blocks_of(one: TracedRequest) -> list[bytes]:
    """The digests of a prompt's whole blocks."""
    ends = range(0, one.prompt // BLOCK * DIGEST_BYTES, DIGEST_BYTES)
    return [one.blocks[at : at + DIGEST_BYTES] for at in ends]


class Run:
    """One way.  answered: the requests that count."""

    def __init__(self, system: System, sent: Sent, way: str) -> None:
        self.answered: list[Answered] = []
        self._system = system
        self._sent = sent
        self._asks = msgspec.msgpack.encode(TTL_S / sent.speed if way == "ttl" else 0.0)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def serve(self) -> None:
        """Send each request at its time, and wait for all answers."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for at, one in zip(self._sent.at, self._sent.requests, strict=True):
                wait = began + at - asyncio.get_running_loop().time()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._in_turn(one, counts=at >= self._sent.warm_s))

    async def _in_turn(self, one: TracedRequest, *, counts: bool) -> None:
        if session := one.parts.get("sessions"):
            async with self._turns[session]:
                await self._ask(one, counts=counts)
        else:
            await self._ask(one, counts=counts)

    async def _ask(self, one: TracedRequest, *, counts: bool) -> None:
        clock = asyncio.get_running_loop().time
        smaller = self._sent.smaller
        params = SamplingParams(max_tokens=max(1, one.output // smaller), ignore_eos=True, temperature=0.0)
        parts = {name: RequestPart(digest=digest, data=self._asks) for name, digest in one.parts.items()}
        prompt = [token for digest in blocks_of(one) for token in of_block(digest, BLOCK // smaller)]
        began = clock()
        options = RequestOptions(parts=parts, origin=Origin(client=one.client))
        stream = self._system.ingress.open(prompt, params, options)
        delta = await stream.next()
        ttft_s = clock() - began
        while delta.finish == Finish.RUNNING:
            delta = await stream.next()
        stream.close()
        assert delta.usage is not None, delta
        if counts:
            usage = delta.usage
            self.answered.append(Answered(one.client, usage.prompt_tokens, usage.cached_tokens, ttft_s))


async def measured(way: str, sent: Sent, parsed: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way."""
    leases = {"max_lease_s": MOST_S / sent.speed}
    sections = {
        "model": {"path": parsed.model},
        "kv": {"num_pages": parsed.pages, "page_size": parsed.page_size},
        "plugins": {"eviction": "lru" if way == "lru" else "lease", "options": {"eviction.lease": leases}},
        "limits": {"max_requests": 1024},
    }
    system = System(build_config(Config(), sections))
    await system.start()
    run, began = Run(system, sent, way), time.monotonic()
    await run.serve()
    late_s = time.monotonic() - began - sent.at[-1]
    await system.stop()
    first = {who: [one.ttft_s for one in run.answered if (AGENTS in one.client) is who] for who in (True, False)}
    p50, p95 = np.percentile(first[True], (50, 95)) * 1000
    others = float(np.percentile(first[False], 95) * 1000)
    times = {"ttft_p50_ms": float(p50), "ttft_p95_ms": float(p95), "others_p95_ms": others, "late_s": late_s}
    return {"way": way, **shares(run.answered), **times}


def optimum(sent: Sent, page_size: int, num_pages: int) -> dict[str, Any]:
    """The figures of a cache that knows the future.  Answers are no prompt that comes again, so only prompts count."""
    of_page = page_size * sent.smaller // BLOCK
    prompts = [blocks_of(one)[of_page - 1 :: of_page] for one in sent.requests]
    lengths = [one.prompt // BLOCK * BLOCK // sent.smaller for one in sent.requests]
    counts = most_found(prompts, [(length - 1) // page_size for length in lengths], num_pages)
    answered = [
        Answered(one.client, length, count * page_size, 0.0)
        for at, one, length, count in zip(sent.at, sent.requests, lengths, counts, strict=True)
        if at >= sent.warm_s
    ]
    return {"way": "optimum", **shares(answered)}


def shares(answered: list[Answered]) -> dict[str, float]:
    """The shares of prompt tokens that were found: of agents together, and of each client."""
    groups = {"found": [one for one in answered if AGENTS in one.client]}
    names = sorted({one.client for one in answered})
    groups |= {name: [one for one in answered if one.client == name] for name in names}
    return {
        name: sum(one.num_found for one in ones) / sum(one.num_tokens for one in ones) for name, ones in groups.items()
    }


def window(parsed: argparse.Namespace) -> Sent:
    """The requests of a run, from amid the traffic."""
    begins, length = 60.0 * parsed.after, parsed.seconds * parsed.speed
    sessions = int(parsed.per_minute * (parsed.after + length / 60) * 1.5) + 8
    whole = traffic(parsed.seed, sessions, parsed.per_minute, parsed.singles)
    longest = parsed.longest * parsed.smaller
    inside = [one for one in whole if begins <= one.at < begins + length and one.prompt <= longest]
    at = [(one.at - begins) / parsed.speed for one in inside]
    return Sent(inside, at, parsed.smaller, parsed.seconds * parsed.warm, parsed.speed)


def text(name: str, value: object) -> str:
    """The text of a cell: a name, milliseconds, seconds or a share."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.1f}" if name.endswith(("_ms", "_s")) else f"{value:.1%}"


def new_arguments() -> argparse.ArgumentParser:
    """The parser of the script."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--seconds", type=float, default=70.0, help="of one way")
    parser.add_argument("--warm", type=float, default=0.3, help="share of them that is not counted")
    parser.add_argument("--speed", type=float, default=6.0, help="times as fast")
    parser.add_argument("--after", type=float, default=10.0, help="minutes of traffic before the run")
    parser.add_argument("--per-minute", type=float, default=1.5, help="sessions that begin in a minute")
    parser.add_argument("--singles", type=float, default=90.0, help="prompts that never come again, in a minute")
    parser.add_argument("--smaller", type=int, default=8, choices=(1, 2, 4, 8, 16), help="times as few tokens")
    parser.add_argument("--pages", type=int, default=600)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1900, help="tokens; longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parsed = new_arguments().parse_args()
    sent = window(parsed)
    rows = [asyncio.run(measured(way, sent, parsed)) for way in parsed.ways]
    rows.append(optimum(sent, parsed.page_size, parsed.pages))
    title = f"{len(sent.requests)} requests, {parsed.pages} pages of {parsed.page_size}, {parsed.speed:g} times as fast"
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(text(name, row.get(name)) for name in rows[0]))
    Console().print(table)
    for row in rows[:-1]:
        print(f"{row['way']}: {row['found'] / rows[-1]['found']:.1%} of the optimum's share")
    asked = {name: value for name, value in vars(parsed).items() if name != "output"}
    keep(parsed.output, {"rows": rows, "requests": len(sent.requests), "asked": asked})


if __name__ == "__main__":
    main()
