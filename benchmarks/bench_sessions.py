"""The share of agents' prompt tokens that is found, and the time to the first token, by how prefixes are kept.

Traffic of coding agents (``agent_traffic.py``) beside prompts that never come again goes through the real planner in
virtual time, as ``callboard whatif`` replays a trace: lru, pins of a fixed time, leases, and as a limit what an
eviction finds that knows the future (Belady), for one request at a time.  Needs no GPU and no torch; two minutes.

    python benchmarks/bench_sessions.py
    python benchmarks/bench_sessions.py --sessions 200 --output results.json

With host memory the prefixes that leave the pool wait there, and a step takes longer with each page that it copies:
what it costs to copy them when a request starts, and what it saves to fetch them before.

    python benchmarks/bench_sessions.py --sessions 10 --pages 1500 --host-pages 20000
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agent_traffic import BLOCK, head, traffic
from belady import most_found
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.features.sessions.leases import Leases
from engine.features.sessions.planner import SessionsPlanner
from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import DIGEST_BYTES, TracedRequest
from engine.plugins.deciders import plugin_policy, plugin_strategy
from engine.plugins.eviction.lease import LeaseOptions
from engine.plugins.kinds import named
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.scheduling.rows import PlannerLimits
from server.extensions.whatif.changes import Case, changed
from server.extensions.whatif.replay import TraceReplay, stand_ins

PIN_S = 60.0
COPY_S = 5e-4  # of a page, which takes 0.8 ms to compute
CLIENTS = ("agents-0", "agents-1", "others")
Row = dict[str, Any]


class Pins(Leases):
    """Leases of a fixed time, without a budget."""

    def expected(self, client: str) -> float:
        return PIN_S


class PinnedCase(Case):
    """A server with such leases."""

    def planner(self, clock: Callable[[], float]) -> Planner:
        plugins = self.config.plugins
        chosen = Plugins({kind: named(plugins, kind) for kind in ("eviction", "policy")}, plugins.options)
        strategy = plugin_strategy(chosen, self.config, self.limits.num_pages)
        options = LeaseOptions()

        def build(parts: Any) -> SessionsPlanner:
            return SessionsPlanner(parts, Pins(10 * parts.limits.num_pages, options))

        return Planner(self.limits, strategy, plugin_policy(chosen, self.config), clock, features=[build])


def seconds(size: StepSize) -> float:
    """Seconds of a step, on a device whose steps take 10 ms, 0.05 ms for each token and 0.5 ms for each page copied."""
    return (
        10e-3 + 50e-6 * (size.decodes + size.prefill_tokens) + 4e-8 * (size.context + size.pairs) + COPY_S * size.copies
    )


def replayed(name: str, case: Case, requests: list[TracedRequest], tokens: list[Any]) -> Row:
    """One way to keep prefixes."""
    result = TraceReplay(case, requests, tokens, seconds).run()
    agents = [one for one in result.ended if one.client.startswith("agents")]
    first = sorted(one.ttft_s for one in agents if one.ttft_s is not None)
    by_client = {
        client: found([(one.num_prompt_tokens, one.cached_tokens) for one in result.ended if one.client == client])
        for client in CLIENTS
    }
    return {
        "way": name,
        "found": found([(one.num_prompt_tokens, one.cached_tokens) for one in agents]),
        "ttft_p50_ms": 1000 * first[len(first) // 2],
        "ttft_p95_ms": 1000 * first[len(first) * 95 // 100],
        "busy": result.busy_s / result.seconds,
        **by_client,
    }


def found(counts: list[tuple[int, int]]) -> float:
    """The share of prompt tokens that needed no computing."""
    return sum(cached for _, cached in counts) / sum(prompt for prompt, _ in counts)


def optimum(requests: list[TracedRequest], limits: PlannerLimits) -> Row:
    """The share with a cache that always evicts the page whose next use is furthest, of one request at a time."""
    pages = [[one.blocks[at : at + DIGEST_BYTES] for at in range(0, len(one.blocks), DIGEST_BYTES)] for one in requests]
    findable = [(one.prompt - 1) // BLOCK for one in requests]
    counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one, number in zip(requests, most_found(pages, findable, limits.num_pages), strict=True):
        counts[one.client].append((one.prompt, number * BLOCK))
    agents = [pair for client, pairs in counts.items() if client.startswith("agents") for pair in pairs]
    return {"way": "optimum", "found": found(agents), **{client: found(counts[client]) for client in CLIENTS}}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--per-minute", type=float, default=1.5, help="sessions that begin in a minute")
    parser.add_argument("--singles", type=float, default=90.0, help="prompts that never come again, in a minute")
    parser.add_argument("--pages", type=int, default=6000)
    parser.add_argument("--host-pages", type=int, default=0, help="compare leases without and with fetching back alone")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    requests = traffic(parsed.seed, parsed.sessions, parsed.per_minute, parsed.singles)
    first = head(parsed.pages)
    tokens = stand_ins(requests, first)
    leased = changed(first, ["plugins.eviction=lease"])
    host = ["plugins.eviction=lease", f"kv.num_host_pages={parsed.host_pages}"]
    cases = {
        "lru": changed(first, ["plugins.eviction=lru"]),
        f"pins of {PIN_S:.0f} s": PinnedCase(leased.name, leased.config, leased.limits),
        "leases": leased,
    }
    if parsed.host_pages:
        cases = {
            "copied at the start": changed(first, host),
            "fetched before": changed(first, [*host, 'plugins.options={"eviction.lease"={fetches=true}}']),
        }
    rows = [replayed(name, case, requests, tokens) for name, case in cases.items()]
    if not parsed.host_pages:
        rows.append(optimum(requests, first.limits))
    table = Table(*rows[0], title=f"{len(requests)} requests, {parsed.pages} pages")
    for row in rows:
        table.add_row(*(text(row.get(name)) for name in rows[0]))
    Console().print(table)
    keep(parsed.output, {"rows": rows, "requests": len(requests)})


def text(value: object) -> str:
    """Text of a cell."""
    if value is None:
        return ""
    return (
        value
        if isinstance(value, str)
        else f"{value:.0f}"
        if isinstance(value, float) and value > 1
        else f"{value:.1%}"
    )


if __name__ == "__main__":
    main()
