"""The share of prompts that a live engine finds cached, and times to first token, by the policy of snapshots.

The conversations of ``bench_host_tier``, whose prompts need four times the KV pool, with a host tier as large as the
pool, go to a hybrid model with random weights, once with each policy of snapshots.  The oracle knows where each prompt
will go on, from a run with a state behind every page, whose answers are the same to the bit: it takes snapshots at
these places, and at the ends of outputs, and no others.  It has as many slots as the policies.  The run with a state
behind every page has a slot for each, so that no snapshot is lost before its pages, and more steps; so has the oracle
with the same slots.
Hit rates and times to first token are those of ``bench_host_tier``; policies take turns.

    python benchmarks/bench_snapshots.py                                     # a tiny hybrid
    python benchmarks/bench_snapshots.py --policies default oracle           # these two alone
    python benchmarks/bench_snapshots.py --policies default --shape qwen3.5-0.8b --conversations 12 --turns 2 \\
        --first-tokens 192
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_host_tier import OVERCOMMIT, Measured, Workload, run
from bench_hybrids import shapes
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3_5TextConfig

from engine.config import load_config
from engine.features.states import planner, rank, slots
from engine.features.states.planner import StatesPlanner
from engine.kv.node import Handle
from engine.kv.pages import Pages
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.plugins.snapshots.policy import PromptPages, SnapshotPolicy
from engine.scheduling.rows import Sequence

MAX_RUNNING = 32
EVERY, ORACLE, UNBOUNDED = "every page", "oracle", "oracle, a slot for each page"
NOTHING = {"keeps_prompts": False, "keeps_turns": False, "keeps_branches": False}
POLICIES: dict[str, SnapshotPolicy] = {
    "default": EndsAndBranches(),
    "prompts": EndsAndBranches(**{**NOTHING, "keeps_prompts": True}),
    "every 16 pages": EndsAndBranches(**NOTHING, every=16),
    "none": EndsAndBranches(**NOTHING),
    EVERY: EndsAndBranches(every=1),
}


class Places:
    """The places where prompts went on, by the tokens before them: a policy that takes snapshots there, and at the
    ends of outputs.

    key: pages of the prompt that starts."""

    keeps_turns, keeps_branches = True, False

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.key = b""
        self.page_bytes = 1

    def of_prompt(self, found: PromptPages) -> list[int]:
        """Return the known places of the prompt."""
        return [pages for pages in range(1, found.num_pages + 1) if self.key[: pages * self.page_bytes] in self.known]


class PlacesPlanner(StatesPlanner):
    """States of a run that notes where prompts go on, or that takes snapshots there."""

    places: Places

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        super().adopt(sequence, handle, key, pages)
        self.places.key, self.places.page_bytes = key, self._tree.page_bytes
        if self._policy is not self.places:
            self.places.known.add(key[: handle.num_pages * self._tree.page_bytes])


def tiny() -> PretrainedConfig:
    """A hybrid with three layers of the gated delta rule and one of attention."""
    return Qwen3_5TextConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip


@contextmanager
def chosen(name: str, places: Places) -> Iterator[None]:
    """Let engines take snapshots by a policy.  places: those that a run with a state behind every page fills."""
    known = planner.snapshot_policy, planner.StatesPlanner, rank.PAGES_PER_SLOT, slots.PAGES_PER_SLOT
    planner.snapshot_policy = lambda *_: POLICIES.get(name, places)
    if name in (EVERY, ORACLE, UNBOUNDED):
        planner.StatesPlanner = type("Planner", (PlacesPlanner,), {"places": places})  # type: ignore[misc]
    if name in (EVERY, UNBOUNDED):
        rank.PAGES_PER_SLOT = slots.PAGES_PER_SLOT = 1  # type: ignore[misc]
    try:
        yield
    finally:
        planner.snapshot_policy, planner.StatesPlanner, rank.PAGES_PER_SLOT, slots.PAGES_PER_SLOT = known  # type: ignore[misc]


def compare(workload: Workload, directory: Path, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """A row of figures of later turns for each policy."""
    page_size = load_config(None, []).kv.page_size
    pages = workload.num_pages(page_size) // OVERCOMMIT
    tables = {
        "model": {"path": str(directory), "tokenizer": "none", "numerics": "invariant"},
        "device": {"threads": 1},
        "kv": {"num_pages": pages, "num_host_pages": pages},
        "scheduler": {"max_running": MAX_RUNNING},
    }
    settings = [f"{table}.{key}={value}" for table, pairs in tables.items() for key, value in pairs.items()]
    measured = {name: (Measured(), Measured()) for name in names}
    places = Places()
    requests = workload.conversations + len(workload.visits)
    with tqdm(total=rounds * len(names) * requests, unit="request", leave=False) as bar:
        for _ in range(rounds):
            for name in names:
                bar.set_description(name)
                with chosen(name, places):
                    asyncio.run(run(load_config(None, settings), workload, *measured[name], bar))
    return [{"policy": name, **turns.row()} for name, (_, turns) in measured.items()]


def show(rows: list[dict[str, Any]], shape: str) -> None:
    """The policies, and how much of the oracle's hits and of its speed each has."""
    table, best = Table(title=shape), next(row for row in rows if row["policy"] == ORACLE)
    for column in ("snapshots", "hit rate", "of the oracle's", "TTFT p50", "p95", "oracle / this, p50"):
        table.add_column(column)
    for row in rows:
        share, ratio = row["hit_rate"] / best["hit_rate"], best["ttft_p50_ms"] / row["ttft_p50_ms"]
        times = f"{row['ttft_p50_ms']:.1f} ms", f"{row['ttft_p95_ms']:.1f} ms"
        table.add_row(row["policy"], f"{row['hit_rate']:.1%}", f"{share:.1%}", *times, f"{ratio:.2f}x")
    Console().print(table)


def main() -> None:
    parser: argparse.ArgumentParser = new_parser(__doc__)
    parser.add_argument("--shape", default="tiny", choices=["tiny", *shapes()])
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6, help="measured turns of a conversation, on average")
    parser.add_argument("--first-tokens", type=int, default=1024, help="of first prompts")
    parser.add_argument("--clients", type=int, default=4, help="most requests open at once")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES, ORACLE, UNBOUNDED])
    arguments = parser.parse_args()
    count = arguments.conversations
    visits = np.random.default_rng(0).integers(0, count, count * arguments.turns)
    sizes = {"turn_tokens": 37, "output_tokens": 21, "first_tokens": arguments.first_tokens}
    workload = Workload(conversations=count, clients=arguments.clients, visits=tuple(visits.tolist()), **sizes)
    torch.manual_seed(1)
    config = tiny() if arguments.shape == "tiny" else shapes()[arguments.shape]
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        names = [one for one in arguments.policies if one not in (EVERY, ORACLE)]
        rows = compare(workload, Path(folder), arguments.rounds, [EVERY, *names, ORACLE])
    show(rows, arguments.shape)
    keep(arguments.output, {"shape": arguments.shape, "rows": rows})


if __name__ == "__main__":
    main()
