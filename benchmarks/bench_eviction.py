"""How much of the prompts does each eviction strategy find where popularity is uneven, polluted, or moves on?

Prompts of 512 tokens come one at a time to a pool with room for 60 of them; each load is the same for all strategies,
so the ratios to lru hold on every machine.  Needs no GPU and no torch; half a minute.

    python benchmarks/bench_eviction.py
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np
from bench_radix import STRATEGIES, Stopwatch, multi_turn, serve, tokens
from rich.console import Console
from rich.table import Table

from engine.kv.radix import RadixTree
from engine.plugins.hookspecs import EvictionContext
from engine.plugins.manager import Plugins

PAGE_SIZE, PROMPT_TOKENS, ROOM = 16, 512, 60
NUM_POPULAR = 300
Prompts = list[np.ndarray]


def popular(rng: np.random.Generator, count: int) -> Iterator[np.ndarray]:
    """Prompts whose popularity follows Zipf's law."""
    known = [tokens(rng, PROMPT_TOKENS) for _ in range(NUM_POPULAR)]
    shares = 1 / np.arange(1, NUM_POPULAR + 1) ** 0.9
    for index in rng.choice(NUM_POPULAR, count, p=shares / shares.sum()).tolist():
        yield known[index]


def zipf(rng: np.random.Generator, count: int) -> Prompts:
    """Nothing else."""
    return list(popular(rng, count))


def scans(rng: np.random.Generator, count: int) -> Prompts:
    """After every 200 of them 100 that never come again."""
    prompts: Prompts = []
    for number, prompt in enumerate(popular(rng, count * 2 // 3), start=1):
        prompts.append(prompt)
        if number % 200 == 0:
            prompts += [tokens(rng, PROMPT_TOKENS) for _ in range(100)]
    return prompts


def moves_on(rng: np.random.Generator, count: int) -> Prompts:
    """Every quarter has its own popular ones; a third of the prompts never come again."""
    known = [prompt for _ in range(4) for prompt in popular(rng, count // 4)]
    return [tokens(rng, PROMPT_TOKENS) if rng.random() < 1 / 3 else prompt for prompt in known]


def chats(rng: np.random.Generator, count: int) -> Prompts:
    """Conversations of up to eight turns, in any order."""
    return multi_turn(0, count // 20, 20, (1, 8), (50, 300))


LOADS: dict[str, Callable[[np.random.Generator, int], Prompts]] = {
    "Zipf": zipf,
    "Zipf with scans": scans,
    "popularity moves on": moves_on,
    "chats": chats,
}


def found(strategy: str, prompts: Prompts) -> float:
    """The share of tokens that are in the cache when they come."""
    num_pages = ROOM * PROMPT_TOKENS // PAGE_SIZE
    context = EvictionContext(page_size=PAGE_SIZE, num_pages=num_pages)
    tree = RadixTree(PAGE_SIZE, Plugins({"eviction": strategy}).hook.callboard_eviction_strategy(context=context))
    return int(serve(tree, num_pages, prompts, Stopwatch())["matched_tokens"]) / sum(map(len, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6000, help="of each load")
    arguments = parser.parse_args()
    table = Table("share of tokens found, and of what lru finds", *STRATEGIES)
    for name, load in LOADS.items():
        prompts = load(np.random.default_rng(0), arguments.prompts)
        shares = {strategy: found(strategy, prompts) for strategy in STRATEGIES}
        table.add_row(name, *(f"{share:.3f} ({share / shares['lru']:.2f})" for share in shares.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
