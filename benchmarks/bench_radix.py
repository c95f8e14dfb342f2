"""The costs of a look-up, an insertion, a lock and an eviction in the radix tree, and how they grow.

Times single calls and shows their medians in microseconds, of the best of several rounds where a round can be repeated:
other work on the machine only ever adds.  A memcmp of 1,408 tokens and a dict look-up are timed in the same run, to
scale figures from other machines.  Needs no GPU and no torch.

    python benchmarks/bench_radix.py                        # all of it; 80 seconds, and 0.9 GB for the 1,000,000 leaves
    python benchmarks/bench_radix.py --most-leaves 50000    # a quarter of that
    python benchmarks/bench_radix.py --output results.json --plot results.png
    python benchmarks/bench_radix.py --sglang FOLDER        # beside SGLang's trees, of an unpacked wheel; needs torch
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.kv.match import Match
from engine.kv.pages import PageAllocator
from engine.kv.radix import RadixTree
from engine.plugins.hookspecs import EvictionContext
from engine.plugins.manager import Plugins

STRATEGIES = ("lru", "priority", "lfu", "fifo", "slru", "s3fifo")
VOCAB_SIZE = 128_000
Row = dict[str, Any]


def new_tree(page_size: int, strategy: str = "lru") -> RadixTree:
    context = EvictionContext(page_size=page_size, num_pages=0)
    return RadixTree(page_size, Plugins({"eviction": strategy}).hook.callboard_eviction_strategy(context=context))


class Stopwatch:
    """Microseconds per call, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter_ns()
        result = work(*arguments)
        self.times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])

    def percentile(self, name: str, percent: float) -> float:
        return float(np.percentile(self.times[name], percent))

    def mean(self, name: str) -> float:
        return statistics.fmean(self.times[name])


def best_median(work: Callable[..., Any], *arguments: Any, rounds: int = 7, calls: int = 200) -> float:
    """The lowest of several rounds' medians."""
    medians = []
    for _ in range(rounds):
        watch = Stopwatch()
        for _ in range(calls):
            watch("call", work, *arguments)
        medians.append(watch.median("call"))
    return min(medians)


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)


# ---- workloads --------------------------------------------------------------------------


def multi_turn(
    seed: int, chats: int, stems: int, turns: tuple[int, int], turn_len: tuple[int, int]
) -> list[np.ndarray]:
    """Every chat's context after each of its turns, chats in random order, turns in their own."""
    rng = np.random.default_rng(seed)
    systems = [tokens(rng, 512) for _ in range(stems)]
    counts = rng.integers(turns[0], turns[1] + 1, chats)
    contexts = {chat: systems[rng.integers(stems)] for chat in range(chats)}
    prompts = []
    for chat in rng.permutation(np.repeat(np.arange(chats), counts)).tolist():
        contexts[chat] = np.concatenate((contexts[chat], tokens(rng, rng.integers(turn_len[0], turn_len[1] + 1))))
        prompts.append(contexts[chat])
    return prompts


def request(tree: RadixTree, allocator: PageAllocator, prompt: np.ndarray, watch: Stopwatch) -> tuple[int, int]:
    """Do what a scheduler does for one prompt, evicting when pages run out; return pages found and evicted."""
    key = tree.key(prompt)
    handle = tree.lock(watch("match", tree.match, key))
    num_found = handle.num_pages
    num_missing = len(prompt) // tree.page_size - num_found
    num_short = max(0, num_missing - allocator.num_free)
    if num_short:
        allocator.free(watch("evict", tree.evict, num_short))
    row = np.concatenate((tree.pages(handle), allocator.allocate(num_missing)))
    watch("publish", tree.publish, handle, key, row)
    tree.unlock(handle)
    return num_found, num_short


def serve(tree: RadixTree, num_pages: int, prompts: list[np.ndarray], watch: Stopwatch) -> Row:
    """Each prompt as a request of its own step."""
    allocator = PageAllocator(num_pages)
    num_found = num_evicted = 0
    for tree.now, prompt in enumerate(prompts):
        found, evicted = watch("request", request, tree, allocator, prompt, watch)
        num_found += found
        num_evicted += evicted
    return {"matched_tokens": num_found * tree.page_size, "evicted_pages": num_evicted}


def insert_all(tree: RadixTree, prompts: list[np.ndarray], watch: Stopwatch) -> None:
    """Each prompt from its first token on, as those without a handle do."""
    first = 0
    for prompt in prompts:
        key, count = tree.key(prompt), len(prompt) // tree.page_size
        watch("insert", insert, tree, key, np.arange(first, first + count, dtype=np.int32))
        first += count


def trace(name: str, prompts: list[np.ndarray], page_size: int, rounds: int) -> Iterator[Row]:
    """A workload with room for everything, matched again, and in half the room.  The best of ``rounds``."""
    best: dict[str, Row] = {}
    most = sum(len(prompt) for prompt in prompts) // page_size
    for _ in range(rounds):
        tree, watch, bounded = new_tree(page_size), Stopwatch(), Stopwatch()
        facts = serve(tree, most, prompts, watch)
        for prompt in prompts:
            watch("re-match", tree.match, tree.key(prompt))
        insert_all(new_tree(page_size), prompts, watch)
        squeezed = serve(new_tree(page_size), tree.num_cached // 2, prompts, bounded)
        new = {operation: {"us": watch.mean(operation)} for operation in ("match", "re-match", "insert")}
        new["request"] = {"us": watch.mean("request"), **facts, "cached_pages": tree.num_cached}
        new["request, half the room"] = {"us": bounded.mean("request"), **squeezed}
        num_evictions = len(bounded.times["evict"])
        new["evict, half the room"] = {
            "us": bounded.mean("evict"),
            "evictions": num_evictions,
            "pages_each": round(squeezed["evicted_pages"] / num_evictions, 1),
        }
        best = {
            operation: min(row, best.get(operation, row), key=lambda row: row["us"]) for operation, row in new.items()
        }
    for operation, row in best.items():
        yield {"workload": name, "page_size": page_size, "operation": operation, **row}


# ---- single operations ------------------------------------------------------------------


def calibrate() -> Iterator[Row]:
    """Time this machine in C."""
    rng = np.random.default_rng(0)
    text = tokens(rng, 1408).tobytes()
    other = bytes(bytearray(text))
    table = {tokens(rng, 16).tobytes(): number for number in range(10_000)}
    names = list(table)
    loops = 10_000

    def compare() -> None:
        for _ in range(loops):
            text == other  # noqa: B015

    def look_up() -> None:
        for name in names:
            table[name]

    for operation, work in (("memcmp of 1,408 tokens", compare), ("look-up among 10,000 keys", look_up)):
        yield {"workload": "calibration", "operation": operation, "us": best_median(work, rounds=5, calls=5) / loops}


def insert(tree: RadixTree, key: bytes, pages: np.ndarray) -> None:
    """Publish as a request that has found nothing and ends at once."""
    handle = tree.lock(tree.match(b""))
    tree.publish(handle, key, pages)
    tree.unlock(handle)


def long_matches() -> Iterator[Row]:
    """One long edge, matched to its last token."""
    for count in (4096, 32_768, 131_072):
        tree, prompt = new_tree(1), tokens(np.random.default_rng(0), count)
        insert(tree, tree.key(prompt), np.arange(count, dtype=np.int32))
        key = tree.key(prompt[:-1])
        yield {
            "workload": "one long prompt",
            "page_size": 1,
            "operation": f"match {count:,} tokens",
            "us": best_median(tree.match, key),
        }


def deep_path(page_size: int) -> Iterator[Row]:
    """A path of 32 nodes: locked by one request, and below a prefix that another keeps."""
    prompt = tokens(np.random.default_rng(0), 32 * 64)
    tree = new_tree(page_size)
    for end in range(64, len(prompt) + 1, 64):
        count = end // page_size
        insert(tree, tree.key(prompt[:end]), np.arange(count, dtype=np.int32) + end * 100)
    match, half = tree.match(tree.key(prompt)), tree.match(tree.key(prompt[: 31 * 64]))
    row = {"workload": "path of 32 nodes", "page_size": page_size}
    yield {**row, "operation": "match", "us": best_median(tree.match, match.key)}
    yield {**row, "operation": "lock + unlock", "us": best_median(lock_and_unlock, tree, match)}
    keep = tree.lock(half)
    yield {**row, "operation": "lock + unlock, 31 kept", "us": best_median(lock_and_unlock, tree, match)}
    tree.unlock(keep)


def lock_and_unlock(tree: RadixTree, match: Match) -> None:
    tree.unlock(tree.lock(match))


def forest(strategy: str, num_leaves: int) -> tuple[RadixTree, list[bytes]]:
    """Leaves of one page below stems of one page, a thousand to a stem; uses, hits and priorities vary."""
    rng = np.random.default_rng(0)
    tree = new_tree(1, strategy)
    keys = []
    for leaf in range(num_leaves):
        key = np.array([leaf // 1000, leaf], dtype=np.int32).tobytes()
        tree.now = leaf // 8
        insert(tree, key, np.array([num_leaves + leaf // 1000, leaf], dtype=np.int32))
        keys.append(key)
    for leaf in rng.integers(0, num_leaves, num_leaves // 4).tolist():
        tree.unlock(tree.lock(tree.match(keys[leaf]), priority=leaf % 5 - 2))
    return tree, keys


def eviction(strategy: str, num_leaves: int) -> Iterator[Row]:
    """One leaf, again and again; and one leaf's way out of the candidates and back."""
    tree, keys = forest(strategy, num_leaves)
    row = {"workload": "eviction", "strategy": strategy, "leaves": num_leaves, "page_size": 1}
    watch = Stopwatch()
    for index in np.random.default_rng(1).permutation(len(keys))[:500].tolist():
        watch("lock + unlock a leaf", lock_and_unlock, tree, tree.match(keys[index]))
    for _ in range(min(500, num_leaves // 2)):
        watch("evict one leaf", tree.evict, 1)
    for operation in watch.times:
        yield {**row, "operation": operation, "us": watch.median(operation), "p99_us": watch.percentile(operation, 99)}


def growth(page_size: int, sizes: list[int]) -> Iterator[Row]:
    """The same operations while the tree grows: prompts of 512 shared tokens and 25 to 75 of their own."""
    rng = np.random.default_rng(0)
    tree, stems = new_tree(page_size), [tokens(rng, 512) for _ in range(20)]
    next_page = 0

    def prompt() -> np.ndarray:
        return np.concatenate((stems[rng.integers(20)], tokens(rng, rng.integers(25, 76))))

    def insert_prompt(watch: Stopwatch) -> bytes:
        nonlocal next_page
        key = tree.key(prompt())
        pages = np.arange(next_page, next_page + len(key) // (4 * page_size), dtype=np.int32)
        next_page += len(pages)
        tree.now += 1
        watch("insert", insert, tree, key, pages)
        return key

    for size in sizes:
        watch = Stopwatch()
        while tree.num_cached < size:
            insert_prompt(watch)
        watch = Stopwatch()
        for key in [insert_prompt(watch) for _ in range(300)]:
            watch("match", tree.match, key)
        for _ in range(300):
            watch("evict a page", tree.evict, 1)
        for operation in watch.times:
            row = {"workload": "growth", "cached_pages": size, "page_size": page_size, "operation": operation}
            yield {**row, "us": watch.median(operation), "p99_us": watch.percentile(operation, 99)}


# ---- beside SGLang ----------------------------------------------------------------------


class OwnTree:
    """The tree here, called as SGLang's are, with pages of one token."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin with an empty tree."""
        self._tree = new_tree(1)

    def key(self, prompt: np.ndarray) -> bytes:
        """Return the prompt as the tree takes it."""
        return self._tree.key(prompt)

    def match(self, key: bytes) -> int:
        """Return the number of tokens that are cached."""
        return self._tree.match(key).num_pages

    def insert(self, key: bytes, slots: np.ndarray) -> None:
        """Add a prompt that has found nothing."""
        self._tree.now += 1
        insert(self._tree, key, slots)

    def evict(self) -> None:
        """Evict one leaf of one token."""
        self._tree.evict(1)

    @property
    def num_cached(self) -> int:
        """The number of tokens in the tree."""
        return self._tree.num_cached


def beside_sglang(folder: Path, rounds: int, num_leaves: int) -> list[Row]:
    """The chats of ``trace`` and the eviction of one leaf in the three trees, in turns; the least of the rounds."""
    import sglang_tree

    trees: dict[str, Any] = {"callboard": OwnTree(), **sglang_tree.load(folder)}
    prompts = multi_turn(0, chats=2000, stems=20, turns=(1, 8), turn_len=(50, 300))
    leaves = [np.array([leaf // 1000, VOCAB_SIZE + leaf], dtype=np.int32) for leaf in range(num_leaves)]
    found: dict[tuple[str, str], list[float]] = {}
    matched = set()
    for _ in range(rounds):
        for name, tree in trees.items():
            watch, sums = Stopwatch(), 0
            for key, slots in _ready(name, tree, prompts):
                sums += watch("match", tree.match, key)
                watch("insert", tree.insert, key, slots)
            matched.add((sums, tree.num_cached))
            for key, slots in _ready(name, tree, leaves):
                tree.insert(key, slots)
            before = tree.num_cached
            for _ in range(50):
                watch("evict one leaf", tree.evict)
            assert before - tree.num_cached == 50, f"{name}: {before - tree.num_cached} tokens of 50 leaves"
            both = watch.mean("match") + watch.mean("insert")
            found.setdefault(("match and insert of 2,000 chats", name), []).append(both)
            found.setdefault((f"evict one of {num_leaves:,} leaves", name), []).append(watch.median("evict one leaf"))
    assert len(matched) == 1, f"the trees differ in what they found and kept: {matched}"
    return [
        {"workload": "beside SGLang", "operation": what, "tree": name, "us": min(us)}
        for (what, name), us in found.items()
    ]


def _ready(name: str, tree: Any, prompts: list[np.ndarray]) -> list[tuple[Any, Any]]:
    """Empty a tree, and return keys and slots as it takes them."""
    import sglang_tree

    tree.clear()
    slots = sglang_tree.slots_of(prompts)
    own = [one.numpy().astype(np.int32) for one in slots] if name == "callboard" else slots
    return [(tree.key(prompt), one) for prompt, one in zip(prompts, own, strict=True)]


def show_beside(rows: list[Row]) -> None:
    """Print a line for each operation, and a column for each tree."""
    names = list(dict.fromkeys(row["tree"] for row in rows))
    table = Table("microseconds, pages of one token", *names)
    for what in dict.fromkeys(row["operation"] for row in rows):
        cells = {row["tree"]: number(row["us"]) for row in rows if row["operation"] == what}
        table.add_row(what, *(cells[name] for name in names))
    Console().print(table)


# ---- the run ----------------------------------------------------------------------------


def run(most_leaves: int, rounds: int) -> list[Row]:
    """All benchmarks, with a progress bar."""
    chats = multi_turn(0, chats=2000, stems=20, turns=(1, 8), turn_len=(50, 300))
    equal_chats = multi_turn(1, chats=512, stems=8, turns=(6, 6), turn_len=(256, 256))
    parts: list[tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]] = [(calibrate, ()), (long_matches, ())]
    parts += [(trace, ("2,000 chats", chats, size, rounds)) for size in (1, 16)]
    parts += [(trace, ("512 chats", equal_chats, size, rounds)) for size in (1, 16, 64)]
    parts += [(deep_path, (size,)) for size in (1, 16)]
    parts += [(growth, (size, [1_000, 10_000, 100_000, 1_000_000])) for size in (1, 16)]
    counts = [count for count in (1_000, 10_000, 50_000, 1_000_000) if count <= most_leaves]
    parts += [(eviction, (strategy, count)) for count in counts for strategy in STRATEGIES]
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(parts))
        for part, arguments in parts:
            progress.update(task, description=part.__name__)
            gc.collect()
            gc.disable()  # A server freezes its heap at start; a million live nodes would be walked again and again.
            rows += part(*arguments)
            gc.enable()
            progress.advance(task)
    return rows


def number(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us >= 1 else f"{us:.3f}"


def by_size(rows: list[Row], size: str, line: Callable[[Row], str]) -> Table:
    """A line per operation, a column per size: median and 99th percentile."""
    sizes = sorted({row[size] for row in rows})
    result = Table("median / p99, us", *(f"{count:,} {size.replace('_', ' ')}" for count in sizes))
    for name in dict.fromkeys(line(row) for row in rows):
        cells = {row[size]: f"{number(row['us'])} / {number(row['p99_us'])}" for row in rows if line(row) == name}
        result.add_row(name, *(cells[count] for count in sizes))
    return result


def growth_line(row: Row) -> str:
    return f"{row['operation']}, page size {row['page_size']}"


def show(console: Console, rows: list[Row]) -> None:
    """Three tables: whole workloads, growth, eviction."""
    workloads = Table("workload", "operation", "us at page size 1", "16", "64")
    plain = [row for row in rows if "p99_us" not in row]
    for name, operation in dict.fromkeys((row["workload"], row["operation"]) for row in plain):
        cells = {
            row.get("page_size", 1): row["us"]
            for row in plain
            if (row["workload"], row["operation"]) == (name, operation)
        }
        workloads.add_row(name, operation, *(number(cells.get(size)) for size in (1, 16, 64)))
    console.print(workloads)
    console.print(by_size([row for row in rows if row["workload"] == "growth"], "cached_pages", growth_line))
    evictions = [row for row in rows if row["workload"] == "eviction"]
    console.print(by_size(evictions, "leaves", lambda row: f"{row['operation']}, {row['strategy']}"))


def plot(rows: list[Row], path: Path) -> None:
    """Cost over size, both logarithmic: a flat line is what one wants."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    evictions = [row for row in rows if row["operation"] == "evict one leaf"]
    for name in STRATEGIES:
        points = [(row["leaves"], row["us"]) for row in evictions if row["strategy"] == name]
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    grown = [row for row in rows if row["workload"] == "growth"]
    for line in dict.fromkeys(growth_line(row) for row in grown):
        points = [(row["cached_pages"], row["us"]) for row in grown if growth_line(row) == line]
        right.plot(*zip(*points, strict=True), marker="o", label=line)
    left.set(xscale="log", yscale="log", xlabel="leaves", ylabel="microseconds", title="evict one leaf")
    right.set(xscale="log", yscale="log", xlabel="cached pages", title="prompts of 512 shared + 25-75 own tokens")
    for axes in (left, right):
        axes.set_ylim(1, 100)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--most-leaves", type=int, default=1_000_000, help="largest tree for the eviction benchmark")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each trace, the best is shown")
    parser.add_argument("--plot", type=Path, help="write a PNG; needs matplotlib")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="of an unpacked wheel: only beside its trees")
    arguments = parser.parse_args()
    if arguments.sglang:
        gc.disable()  # as in ``run``
        beside = beside_sglang(arguments.sglang, arguments.rounds, min(50_000, arguments.most_leaves))
        show_beside(beside)
        keep(arguments.output, {"rows": beside})
        return
    rows = run(arguments.most_leaves, arguments.rounds)
    show(Console(), rows)
    keep(arguments.output, {"rows": rows})
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
