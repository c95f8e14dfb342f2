"""How fast is a float32 linear layer on this CPU in each layout torch offers, and which one should ``pack`` take?

Every layout multiplies the same input by the same weights, in turns.  Weights come from a ring larger than the
caches, as they do in a model of billions of parameters; ``--ring-mb 12`` is the demo model, which stays in the cache.
With one row a product is bound by reading its weights, so a plain sum over as many bytes of the same ring takes turns
with the layouts: "of read" is the share of that bandwidth which callboard's product reaches.

    python benchmarks/bench_linear.py                # all shapes, all cores
    python benchmarks/bench_linear.py --threads 1 --shapes 1024x3072 --rows 1 8
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.plugins.linear import onednn

# outputs x inputs: Qwen3-0.6B's output, gate or up, and query projections, its LM head, the demo model's layers.
SHAPES = ("1024x3072", "3072x1024", "2048x1024", "151936x1024", "864x256", "512x256", "256x432", "256x256", "3072x256")
ROWS = (1, 8, 64)
MAX_TURNS = 200

READ = "read"
Product = Callable[[int], Tensor]


def products(
    x: Tensor, weights: list[Tensor], pool: ThreadPoolExecutor, inductor: bool
) -> Iterator[tuple[str, Product]]:
    """(name, product with the i-th weight) of every layout; the first one is what the others are compared with."""
    rows = len(x)
    yield "F.linear", lambda i: F.linear(x, weights[i])
    if rows == 1:
        yield "mv", lambda i: torch.mv(weights[i], x[0])
    halves = [weight.chunk(2) for weight in weights]

    def in_two_threads(i: int) -> Tensor:
        upper = pool.submit(F.linear, x, halves[i][1])
        return torch.cat((F.linear(x, halves[i][0]), upper.result()), -1)

    yield "2 threads", in_two_threads
    transposed = [weight.t().contiguous() for weight in weights]
    yield "x @ W^T", lambda i: x @ transposed[i]
    mkl = [torch.ops.mkl._mkl_reorder_linear_weight(weight, rows) for weight in weights]
    yield "MKL packed", lambda i: torch.ops.mkl._mkl_linear(x, mkl[i], weights[i], None, rows)
    yield "oneDNN plain", lambda i: torch.ops.mkldnn._linear_pointwise.default(x, weights[i], None, "none", [], "")
    blocked = [torch.ops.mkldnn._reorder_linear_weight(weight, onednn.ROWS) for weight in weights]
    yield "oneDNN packed", lambda i: torch.ops.mkldnn._linear_pointwise.default(x, blocked[i], None, "none", [], "")
    if inductor:
        compiled = [_compile(weight, x) for weight in weights]
        yield "Inductor", lambda i: compiled[i](x)
    packed = [onednn.BlockedWeight(weight) for weight in weights]
    yield "callboard", lambda i: packed[i](x, None)


def _compile(weight: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A product compiled for this weight and this number of rows: with both known, Inductor may choose a packed GEMM
    template of its own or one of a library, whichever it measures to be faster."""
    options = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer.eval(), dynamic=False, options=options)
    compiled(x)
    return compiled


def measure(
    outputs: int, inputs: int, rows: int, ring_bytes: int, pool: ThreadPoolExecutor, inductor: bool
) -> tuple[dict[str, float], dict[str, float], float]:
    """Median seconds of each layout; the median over turns of how many times faster than F.linear it is; and the share
    of the bandwidth of reading that callboard's product has.

    A turn's times are divided by each other, so that a machine that is busy for a while slows all layouts alike.
    """
    weight_bytes = outputs * inputs * 4
    # Every weight of the ring is a compilation of its own.
    ring = max(1, min(8 if inductor else 256, ring_bytes // weight_bytes))
    weights = [torch.randn(outputs, inputs) for _ in range(ring)]
    x = torch.randn(rows, inputs)
    layouts = dict(products(x, weights, pool, inductor))
    expected = layouts["F.linear"](0).flatten()
    for name, product in layouts.items():
        torch.testing.assert_close(product(0).flatten(), expected, rtol=1e-4, atol=1e-3, msg=f"{name} is wrong")
    layouts[READ] = lambda i: weights[i].sum()
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for turn in range(max(7, min(MAX_TURNS, int(4e9 / weight_bytes / max(rows, 8))))):
        for offset, (name, product) in enumerate(layouts.items()):
            start = time.perf_counter()
            product((turn * len(layouts) + offset) % ring)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    faster = {name: _ratio(seconds["F.linear"], values) for name, values in seconds.items() if name != READ}
    return medians, faster, _ratio(seconds[READ], seconds["callboard"])


def _ratio(slower: list[float], faster: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(slower, faster, strict=True))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's own threads, set back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    yield
    torch.set_num_threads(before)


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for all cores")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of the input")
    parser.add_argument("--ring-mb", type=int, default=192, help="weights of one shape that take turns")
    parser.add_argument("--inductor", action="store_true", help="compile each product as well; minutes")
    arguments = parser.parse_args()
    results = []
    table: Table | None = None
    torch._dynamo.config.recompile_limit = 64  # layers of one class share their cache
    # Not inference_mode: Inductor freezes weights only of what it can guard.
    with torch.no_grad(), torch_threads(arguments.threads), ThreadPoolExecutor(1) as pool:
        title = f"{torch.get_num_threads()} torch threads; times faster than F.linear"
        for shape in arguments.shapes:
            outputs, inputs = map(int, shape.split("x"))
            for rows in arguments.rows:
                seconds, faster, share = measure(
                    outputs, inputs, rows, arguments.ring_mb << 20, pool, arguments.inductor
                )
                case = {"shape": shape, "rows": rows, "threads": torch.get_num_threads()}
                microseconds = {name: round(one * 1e6, 1) for name, one in seconds.items()}
                rounded = {name: round(one, 2) for name, one in faster.items()}
                result = {**case, "us": microseconds, "times_faster_than_f_linear": rounded}
                if rows == 1:
                    result["share_of_read_bandwidth"] = round(share, 2)
                results.append(result)
                names = [name for name in faster if name not in ("F.linear", "mv")]
                if table is None:
                    columns = ("shape", "rows", "F.linear us", "read GB/s", "of read", "mv", *names)
                    table = Table(*columns, title=title, padding=(0, 0))
                facts = [f"{seconds['F.linear'] * 1e6:.0f}", f"{outputs * inputs * 4 / seconds[READ] / 1e9:.1f}"]
                facts.append(f"{share:.0%}" if rows == 1 else "")
                ratios = [f"{faster[name]:.2f}" if name in faster else "" for name in ("mv", *names)]
                table.add_row(shape, str(rows), *facts, *ratios)
    if table is not None:
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
