"""What do products cost when their rows are padded to few numbers, in time and in memory that oneDNN keeps?

Random numbers of rows go through one weight of each shape, exact and padded to so many sizes an octave.  "cold" is the
first pass, in which oneDNN compiles, "warm" the median of the passes after it; both are ratios to the warm exact pass,
with which they take turns.  Memory is what the cold pass has left behind.

    python benchmarks/bench_rows.py
    python benchmarks/bench_rows.py --shapes 1024x1024 6144x1024 1024x3072 --most-rows 512
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.plugins.linear import onednn

SHAPES = ("512x256", "256x256", "864x256", "256x432", "3072x256")  # outputs x inputs of the demo model
WAYS = {"exact": 1 << 20, "8 an octave": 8, "4 an octave": 4, "2 an octave": 2}


def kept_bytes() -> int:
    """Resident memory that no file stands behind, without what malloc could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def seconds_of(run: Callable[[], None]) -> float:
    """How long it takes, once."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--most-rows", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--numbers", type=int, default=40, help="of rows, drawn at random")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("rows up to", "sizes", "cold", "warm", "kept MB")
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    weights = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape), onednn.ROWS) for shape in shapes]
    results = []
    for most in arguments.most_rows:
        rows = random.Random(0).choices(range(2, most + 1), k=arguments.numbers)
        inputs = [torch.randn(most, size) for _, size in shapes]

        def run_all(sizes: int, inputs: list[Tensor] = inputs, rows: list[int] = rows) -> None:
            onednn.SIZES_PER_OCTAVE = sizes
            for number in rows:
                for x, weight in zip(inputs, weights, strict=True):
                    onednn.padded_product(x[:number], weight, None)

        cold, kept, warm = {}, {}, {name: list[float]() for name in WAYS}
        # The coarsest first, since what it compiles is among what the finer ones need.
        for name, sizes in reversed(WAYS.items()):
            before = kept_bytes()
            cold[name] = seconds_of(lambda sizes=sizes: run_all(sizes))
            kept[name] = kept_bytes() - before
        for _ in range(arguments.turns):
            for name, sizes in WAYS.items():
                warm[name].append(seconds_of(lambda sizes=sizes: run_all(sizes)))
        exact = statistics.median(warm["exact"])
        total = 0
        for name in reversed(WAYS):
            total += kept[name]  # of the coarser ones too: an upper bound
            ratio = statistics.median(one / other for one, other in zip(warm[name], warm["exact"], strict=True))
            entry = {"most_rows": most, "sizes": name, "cold": cold[name] / exact, "warm": ratio, "kept_bytes": total}
            results.append(entry)
            table.add_row(str(most), name, f"{entry['cold']:.2f}", f"{ratio:.2f}", f"{total / 1e6:.0f}")
    Console().print(table)
    keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
