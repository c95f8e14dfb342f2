"""What does speculation bring, and what does it cost where nothing can be guessed?

The demo model answers by greedy decoding, whose text repeats what it was given, and by sampling, which repeats little;
prompts are code to go on with, several turns of it, and random tokens.  Engines with and without a proposer take turns,
and each figure is the best of them: the ratio of tokens per second to those without, and of tokens per second of
processor time, which other work on the machine disturbs less.  Greedy tokens must be the same.

    python benchmarks/bench_speculation.py --json benchmarks/results/speculation_2core_cpu.json
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from rich.console import Console
from rich.table import Table

from callboard import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo_model"
PROPOSERS = ("none", "ngram", "suffix")
SOURCE = (ROOT / "engine" / "scheduling" / "decodes.py").read_text()
Prompt = str | list[int]


def editing(index: int) -> Prompt:
    """Code that is copied with changes."""
    return f"{SOURCE[:1200]}\n\n# The same once more, number {index}:\n\n{SOURCE[:200]}"


def turns(index: int) -> Prompt:
    """A question about code, some answers, and the question again."""
    parts = (f"# {index}\n{SOURCE[at : at + 300]}\n# again:\n{SOURCE[at : at + 150]}" for at in (0, 300, 0))
    return "\n".join(parts)


def noise(index: int) -> Prompt:
    """Tokens that mean nothing."""
    rng = random.Random(index)
    return [rng.randrange(100, 3000) for _ in range(300)]


WORKLOADS = {"editing": (editing, 0.0), "turns": (turns, 0.0), "sampled": (editing, 1.0), "random": (noise, 1.0)}


def measure(engines: dict[str, LLM], name: str, batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The best seconds of each engine, which take turns, and what became of proposals."""
    make, temperature = WORKLOADS[name]
    prompts = [make(index) for index in range(batch)]
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        for index in range(batch)
    ]
    best, cpu = dict.fromkeys(engines, float("inf")), dict.fromkeys(engines, float("inf"))
    said, accepted = {}, dict.fromkeys(engines, 0)
    for _ in range(rounds):
        for proposer, llm in engines.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            found = llm.generate(prompts, params)
            best[proposer] = min(best[proposer], time.perf_counter() - began)
            cpu[proposer] = min(cpu[proposer], time.process_time() - cpu_began)
            said[proposer] = [one.token_ids for one in found]
            accepted[proposer] = sum(one.usage.accepted_tokens for one in found)
    if not temperature:
        assert all(tokens == said["none"] for tokens in said.values()), f"{name}: speculation has changed tokens"
    ratios = {proposer: round(best["none"] / seconds, 2) for proposer, seconds in best.items()}
    cpu_ratios = {proposer: round(cpu["none"] / seconds, 2) for proposer, seconds in cpu.items()}
    share = {proposer: round(count / (batch * num_tokens), 2) for proposer, count in accepted.items()}
    named = {"workload": name, "batch": batch, "seconds": best}
    return {**named, "ratio": ratios, "cpu_ratio": cpu_ratios, "accepted_share": share}


def main() -> None:
    """Print a table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    base = {"model": {"path": str(DEMO)}, "device": {"threads": 1}, "kv": {"num_pages": 1024}}
    engines = {name: LLM(progress=False, config={**base, "plugins": {"proposer": name}}) for name in PROPOSERS}
    table = Table("workload", "batch", *(f"{name}: ratio, of CPU" for name in PROPOSERS[1:]), "accepted (ngram)")
    rows = []
    for name in WORKLOADS:
        for batch in given.batches:
            row = measure(engines, name, batch, given.tokens, given.rounds)
            rows.append(row)
            shown = [f"{row['ratio'][one]:.2f}, {row['cpu_ratio'][one]:.2f}" for one in PROPOSERS[1:]]
            table.add_row(name, str(batch), *shown, f"{row['accepted_share']['ngram']:.0%}")
    for llm in engines.values():
        llm.close()
    Console().print(table)
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
