"""Traffic of coding agents as a trace: sessions that come back after pauses, forks, and requests beside them.

Owns: the shape of the traffic.  Does not know: servers, strategies.
The shape is that of a public trace of coding agents, at a sixteenth of its tokens: a median of 43 turns, prompts that
grow from a prefix that all sessions of a client share to about 9,000 tokens, pauses from 0.1 to 60 s while tools run,
and a subagent, which begins anew behind the shared prefix, in 44 of 100 sessions.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from engine.features.sessions.planner import session_part
from engine.features.traffic.trace import DIGEST_BYTES, FORMAT, TracedRequest, TraceHead
from engine.scheduling.rows import PlannerLimits

BLOCK = 16
SHARED_TOKENS = 1280  # of a client's system prompt and tools
MEDIAN_TURNS, MEDIAN_GROWTH, MEDIAN_OUTPUT = 43, 160, 28
MEDIAN_PAUSE_S, LEAST_PAUSE_S, MOST_PAUSE_S = 4.0, 0.1, 60.0
TOKENS_PER_S = 50.0  # of an answer; the pause begins after it
SHARE_OF_FORKS = 0.44
SINGLE_TOKENS = 1024  # of a prompt that never comes again


def head(num_pages: int) -> TraceHead:
    """The first line of such a trace, of a server with so many pages."""
    sizes = {"max_running": 64, "max_step_tokens": 2048, "prefill_chunk": 2048}
    limits = PlannerLimits(**sizes, page_size=BLOCK, num_pages=num_pages, max_len=32_768, eos_token_ids=(0,))
    return TraceHead(FORMAT, "0", "agents", 0.0, BLOCK, limits, {"scheduler": sizes})


def traffic(seed: int, num_sessions: int, per_minute: float, singles_per_minute: float) -> list[TracedRequest]:
    """Requests in the order of their arrival: sessions of two clients, and single prompts of a third one."""
    rng = np.random.default_rng(seed)
    requests: list[TracedRequest] = []
    at = 0.0
    for number in range(num_sessions):
        at += rng.exponential(60 / per_minute)
        requests += session(rng, f"{number}", at, f"agents-{number % 2}")
    until = max(one.at for one in requests)
    for number, when in enumerate(np.cumsum(rng.exponential(60 / singles_per_minute, 10**6))):
        if when > until:
            break
        requests.append(request(float(when), f"single-{number}", [(f"single-{number}", SINGLE_TOKENS)], 64, "others"))
    return sorted(requests, key=lambda one: one.at)


def session(
    rng: np.random.Generator, name: str, at: float, client: str, *, may_fork: bool = True
) -> Iterator[TracedRequest]:
    """The requests of one session, and of its subagent."""
    text = [(client, SHARED_TOKENS), (f"{name}-0", int(rng.lognormal(np.log(200), 0.5)))]
    num_turns = max(2, int(rng.lognormal(np.log(MEDIAN_TURNS if may_fork else MEDIAN_TURNS / 4), 0.5)))
    forks_at = int(rng.integers(num_turns)) if may_fork and rng.random() < SHARE_OF_FORKS else -1
    for turn in range(num_turns):
        output = max(4, int(rng.lognormal(np.log(MEDIAN_OUTPUT), 0.7)))
        yield request(at, name, text, output, client)
        at += output / TOKENS_PER_S
        if turn == forks_at:
            yield from session(rng, f"{name}-sub", at, client, may_fork=False)
        at += float(np.clip(rng.lognormal(np.log(MEDIAN_PAUSE_S), 1.2), LEAST_PAUSE_S, MOST_PAUSE_S))
        text = [*text, (f"{name}-{turn}-answer", output), (f"{name}-{turn}-result", growth(rng))]


def growth(rng: np.random.Generator) -> int:
    """Tokens of a tool's result."""
    return max(8, int(rng.lognormal(np.log(MEDIAN_GROWTH), 0.8)))


def request(at: float, name: str, text: list[tuple[str, int]], output: int, client: str) -> TracedRequest:
    """One request.  text: what the prompt is made of, as names of pieces and their tokens."""
    prompt = sum(count for _, count in text)
    return TracedRequest(
        at=at, prompt=prompt, output=output, finish="length", max_tokens=output, e2e_s=0.0, client=client,
        blocks=blocks([*text, (f"{name}-{at}-answer", output)]),
        parts={} if name.startswith("single") else {"sessions": session_part(name).digest},
    )  # fmt: skip


def blocks(text: list[tuple[str, int]]) -> bytes:
    """Digests of the whole blocks of a text: equal where everything up to their end is."""
    found, state, left = [], hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for name, count in text:
        state.update(f"{name}/".encode())  # a name ends: "single-1" is no beginning of "single-11"
        begun, left = left, left + count
        for index in range(left // BLOCK):
            one = state.copy()
            one.update(f"{index}-{begun}".encode())
            found.append(one.digest())
        left %= BLOCK
    return b"".join(found)
