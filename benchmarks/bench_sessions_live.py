"""The share of agents' prompt tokens that a running engine finds, and the time to the first token, for lru and leases.

The traffic is that of ``bench_sessions.py``, with an eighth of its tokens, which fits the demo model, and ten times as
fast.  It goes to the engine without HTTP, once for each way, at the times of the traffic; a turn waits for the answer
to the one before it.  The engine and its clients share a process and an event loop.  Eight minutes with the defaults.

    python benchmarks/bench_sessions_live.py
    python benchmarks/bench_sessions_live.py --sessions 6 --speed 20
"""

import asyncio
import hashlib
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
from agent_traffic import BLOCK, traffic
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.config import Config, build_config
from engine.control.system import System
from engine.features.traffic.trace import DIGEST_BYTES, TracedRequest
from engine.messages import Finish, RequestOptions
from engine.types.params import SamplingParams
from engine.types.prompt import Origin, RequestPart

SMALLER = 8  # times as few tokens
OF_BLOCK = BLOCK // SMALLER
FIRST_TOKEN, NUM_TOKENS = 8, 256  # of which prompts are made
WAYS = ("lru", "lease")


@cache
def of_block(digest: bytes) -> tuple[int, ...]:
    """Tokens for a block of the trace: equal blocks have equal ones."""
    seed = int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "big")
    drawn = np.random.default_rng(seed).integers(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS, OF_BLOCK)
    return tuple(drawn.tolist())


def prompt_of(one: TracedRequest) -> list[int]:
    """A prompt's tokens."""
    ends = range(0, one.prompt // BLOCK * DIGEST_BYTES, DIGEST_BYTES)
    return [token for at in ends for token in of_block(one.blocks[at : at + DIGEST_BYTES])]


class Run:
    """One way.  counts: client -> prompt tokens, and how many of them were found.  first: seconds to first tokens."""

    def __init__(self, system: System, speed: float) -> None:
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.first: list[float] = []
        self._system = system
        self._speed = speed
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def serve(self, requests: list[TracedRequest]) -> None:
        """Send each request at its time, and wait for all answers."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for one in requests:
                wait = began + (one.at - requests[0].at) / self._speed - asyncio.get_running_loop().time()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._in_turn(one))

    async def _in_turn(self, one: TracedRequest) -> None:
        if session := one.parts.get("sessions"):
            async with self._turns[session]:
                await self._ask(one)
        else:
            await self._ask(one)

    async def _ask(self, one: TracedRequest) -> None:
        clock = asyncio.get_running_loop().time
        params = SamplingParams(max_tokens=max(1, one.output // SMALLER), ignore_eos=True, temperature=0.0)
        parts = {name: RequestPart(digest=digest) for name, digest in one.parts.items()}
        options = RequestOptions(parts=parts, origin=Origin(client=one.client))
        began = clock()
        stream = self._system.ingress.open(prompt_of(one), params, options)
        delta = await stream.next()
        if parts:
            self.first.append(clock() - began)
        while delta.finish == Finish.RUNNING:
            delta = await stream.next()
        stream.close()
        assert delta.usage is not None, delta
        self.counts[one.client][0] += delta.usage.prompt_tokens
        self.counts[one.client][1] += delta.usage.cached_tokens


async def measured(way: str, requests: list[TracedRequest], pages: int, speed: float) -> dict[str, Any]:
    """The figures of one way."""
    sections = {
        "model": {"path": "demo"},
        "kv": {"num_pages": pages},
        "plugins": {"eviction": way},
        "limits": {"max_requests": 1024},
    }
    system = System(build_config(Config(), sections))
    await system.start()
    run = Run(system, speed)
    await run.serve(requests)
    await system.stop()
    agents = [counts for client, counts in run.counts.items() if client.startswith("agents")]
    total, found = (sum(column) for column in zip(*agents, strict=True))
    p50, p95 = np.percentile(run.first, (50, 95)) * 1000
    by_client = {client: counts[1] / counts[0] for client, counts in sorted(run.counts.items())}
    return {"way": way, "found": found / total, "ttft_p50_ms": float(p50), "ttft_p95_ms": float(p95), **by_client}


def text(value: object) -> str:
    """The text of a cell: a name, milliseconds or a share."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if value > 1 else f"{value:.1%}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--per-minute", type=float, default=1.5, help="sessions that begin in a minute")
    parser.add_argument("--singles", type=float, default=90.0, help="prompts that never come again, in a minute")
    parser.add_argument("--pages", type=int, default=750, help="of 16 tokens")
    parser.add_argument("--speed", type=float, default=10.0, help="times as fast")
    parser.add_argument("--longest", type=int, default=1900, help="tokens; longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    sent = traffic(parsed.seed, parsed.sessions, parsed.per_minute, parsed.singles)
    sent = [one for one in sent if one.prompt // SMALLER <= parsed.longest]
    rows = [asyncio.run(measured(way, sent, parsed.pages, parsed.speed)) for way in WAYS]
    table = Table(*rows[0], title=f"{len(sent)} requests, {parsed.pages} pages, {parsed.speed:g} times as fast")
    for row in rows:
        table.add_row(*map(text, row.values()))
    Console().print(table)
    keep(parsed.output, {"rows": rows, "requests": len(sent), "speed": parsed.speed, "pages": parsed.pages})


if __name__ == "__main__":
    main()
