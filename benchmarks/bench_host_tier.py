"""What do the host tier and the store bring when the conversations need four times the KV pool?

Conversations whose turns come in random order, each prompt being the whole history plus some new tokens, go through the
real engine, a fresh one each time: without further tiers, with a host tier as large as the pool, with one that holds
everything, with files alone, with files behind the small host tier, and once more over the same files after a restart.
First prompts are told apart from later turns: only after a restart can they be cached.  Time to first token is by the
client's clock, from the request to the first delta; hit rate is cached prompt tokens over prompt tokens.

    python benchmarks/bench_host_tier.py                         # the demo model, four minutes on two cores
    python benchmarks/bench_host_tier.py --clients 1 --rounds 1  # without waiting for each other
    python benchmarks/bench_host_tier.py --set model.path=DIRECTORY --first-tokens 8000 --output FILE
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from callboard import SamplingParams
from engine.config import Config, load_config
from engine.control.system import System
from engine.messages import Finish

OVERCOMMIT = 4  # working set over pool


@dataclass(frozen=True)
class Workload:
    """visits: the conversations whose turn it is, in order, drawn uniformly: without a host tier about a quarter of
    what they ask for is still in the pool."""

    conversations: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    clients: int
    visits: tuple[int, ...]

    def history_tokens(self) -> list[int]:
        """How long each conversation is in the end."""
        turns = np.bincount(self.visits, minlength=self.conversations)
        lengths = self.first_tokens + self.output_tokens + turns * (self.turn_tokens + self.output_tokens)
        return lengths.tolist()

    def num_pages(self, page_size: int) -> int:
        """Pages that hold the K/V of every conversation."""
        return sum(-(-length // page_size) for length in self.history_tokens())


@dataclass
class Measured:
    """One kind of run; a list has an entry per request, over all rounds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        ttft_ms = np.array(self.ttft_s) * 1e3
        return {
            "requests": len(self.ttft_s),
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4),
            "ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 2),
            "ttft_p95_ms": round(float(np.percentile(ttft_ms, 95)), 2),
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True)
class Tiers:
    """What an engine has beside its pool.  host: pages, as a multiple of the pool's.  restarted: it finds files."""

    host: int = 0
    files: bool = False
    restarted: bool = False


KINDS = {
    "none": Tiers(),
    "host 1x": Tiers(host=1),
    f"host {OVERCOMMIT}x": Tiers(host=OVERCOMMIT),
    "files": Tiers(files=True),
    "host 1x + files": Tiers(host=1, files=True),
    "after a restart": Tiers(host=1, files=True, restarted=True),
}


async def run(
    config: Config, workload: Workload, first: Measured, turns: Measured, bar: "tqdm[Any]"
) -> list[list[int]]:
    """One engine's life; returns the conversations.  first, turns: take what the first prompts bring, and the rest."""
    system = System(config)
    longest = max(workload.history_tokens())
    if longest > system.max_len:
        raise SystemExit(f"a conversation has {longest} tokens in the end, the model's context is {system.max_len}")
    await system.start()
    try:
        rng = np.random.default_rng(1)
        vocab_size = system.spec.vocab_size
        tokens = [rng.integers(0, vocab_size, workload.first_tokens).tolist() for _ in range(workload.conversations)]
        new = rng.integers(0, vocab_size, (len(workload.visits), workload.turn_tokens)).tolist()
        for measured, visits, more in (
            (first, list(range(workload.conversations)), None),
            (turns, list(workload.visits), new),
        ):
            start = time.perf_counter()
            await visit(system, tokens, visits, workload, measured, bar, more)
            measured.seconds += time.perf_counter() - start
    finally:
        await system.stop()
    return tokens


async def visit(
    system: System,
    histories: list[list[int]],
    visits: list[int],
    workload: Workload,
    measured: Measured,
    bar: "tqdm[Any]",
    turns: list[list[int]] | None = None,
) -> None:
    """Clients take the visits in order; a conversation's next turn waits for the answer to the one before."""
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    free = [asyncio.Lock() for _ in histories]
    todo = iter(enumerate(visits))

    async def client() -> None:
        for number, conversation in todo:
            async with free[conversation]:
                history = histories[conversation]
                if turns is not None:
                    history += turns[number]
                history += await ask(system, history, params, measured)
            bar.update()

    async with asyncio.TaskGroup() as group:
        for _ in range(workload.clients):
            group.create_task(client())


async def ask(system: System, prompt: list[int], params: SamplingParams, measured: Measured) -> list[int]:
    """One request, noted; returns the tokens of the answer."""
    answer: list[int] = []
    start = time.perf_counter()
    stream = system.ingress.open(prompt, params)
    async for delta in stream:
        if not answer and delta.token_ids:
            measured.ttft_s.append(time.perf_counter() - start)
        answer += np.frombuffer(delta.token_ids, dtype=np.int32).tolist()
        if delta.finish != Finish.RUNNING:
            assert delta.usage is not None, "the last delta carries the usage"
            measured.prompt_tokens += delta.usage.prompt_tokens
            measured.cached_tokens += delta.usage.cached_tokens
            break
    return answer


def compare(
    workload: Workload, overrides: list[str], rounds: int, folder: Path
) -> tuple[list[dict[str, Any]], int, int]:
    """A row for the first prompts and one for the turns of each kind; pages in the pool; and how many conversations
    went differently from those without further tiers."""
    page_size = load_config(None, overrides).kv.page_size
    pool_pages = workload.num_pages(page_size) // OVERCOMMIT
    measured = {name: (Measured(), Measured()) for name in KINDS}
    differing = 0
    num_requests = workload.conversations + len(workload.visits)
    with tqdm(total=len(KINDS) * rounds * num_requests, unit="request", leave=False) as bar:
        for number in range(rounds):
            ends: list[list[list[int]]] = []
            for name, tiers in KINDS.items():
                bar.set_description(f"round {number + 1} of {rounds}, {name}")
                settings = ["model.tokenizer=none", f"kv.num_pages={pool_pages}"]
                settings.append(f"kv.num_host_pages={tiers.host * pool_pages}")
                if tiers.files:
                    path = folder / f"{number}-{tiers.host}"
                    settings += ["plugins.kv_store=files", f'plugins.options={{"kv_store.files"={{path="{path}"}}}}']
                    assert path.exists() == tiers.restarted, f"{path}: only a restart finds a folder"
                config = load_config(None, [*settings, *overrides])
                ends.append(asyncio.run(run(config, workload, *measured[name], bar)))
            differing += sum(one != other for end in ends[1:] for one, other in zip(ends[0], end, strict=True))
    rows = [
        {"tiers": name, "prompts": prompts, **one.row()}
        for name, both in measured.items()
        for prompts, one in zip(("first", "turns"), both, strict=True)
    ]
    return rows, pool_pages, differing


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Each kind, and how much sooner the first token comes than without further tiers."""
    table = Table(title=title)
    for column in ("tiers", "prompts", "hit rate", "TTFT p50", "TTFT p95", "none / this, p50", "whole run"):
        table.add_column(column, justify="left" if column in ("tiers", "prompts") else "right")
    base = {row["prompts"]: row for row in rows if row["tiers"] == "none"}
    for row in rows:
        ratio = base[row["prompts"]]["ttft_p50_ms"] / row["ttft_p50_ms"]
        times = [f"{row['ttft_p50_ms']:.1f} ms", f"{row['ttft_p95_ms']:.1f} ms", f"{ratio:.2f}x"]
        table.add_row(row["tiers"], row["prompts"], f"{row['hit_rate']:.1%}", *times, f"{row['seconds']:.1f} s")
    Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument(
        "--turns", type=int, default=8, help="measured turns of a conversation, on average (default: 8)"
    )
    parser.add_argument("--first-tokens", type=int, default=1024, help="length of first prompts (default: 1024)")
    parser.add_argument("--turn-tokens", type=int, default=32, help="new tokens of a later turn (default: 32)")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens of an answer (default: 16)")
    parser.add_argument("--clients", type=int, default=4, help="most requests open at once (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="configuration")
    arguments = parser.parse_args()
    visits = np.random.default_rng(0).integers(0, arguments.conversations, arguments.conversations * arguments.turns)
    workload = Workload(
        conversations=arguments.conversations,
        first_tokens=arguments.first_tokens,
        turn_tokens=arguments.turn_tokens,
        output_tokens=arguments.output_tokens,
        clients=arguments.clients,
        visits=tuple(visits.tolist()),
    )
    with TemporaryDirectory() as folder:
        rows, pool_pages, differing = compare(workload, arguments.set, arguments.rounds, Path(folder))
    show(rows, f"{workload.conversations} conversations, {OVERCOMMIT}x the pool of {pool_pages} pages")
    if differing:
        print(f"{differing} conversations went differently with further tiers")
    settings = {**vars(arguments), "output": None, "pool_pages": pool_pages, "differing_conversations": differing}
    keep(arguments.output, {"workload": settings, "rows": rows})


if __name__ == "__main__":
    main()
