"""What does rounding weights cost in quality, and what does it win in speed and memory, on this CPU?

Times are CPU time of this process: where others use the machine as well, a clock says little.  Two tables.
Products: one layer's shapes from a ring of weights larger than the caches, every kernel in turns with oneDNN's packed
float32; "x" is the median over turns of how many times faster it is, "error" the relative L2 error against float64 and
the weights before they were rounded.
Models: output tokens per CPU second of a checkpoint alone and in batches, each choice in turns with the first one, and
the perplexity of files of Python's standard library.

    python benchmarks/bench_quantization.py                        # the demo model
    python benchmarks/bench_quantization.py --model DIR --threads 2 --batches 1 8 32

As on a CPU without AVX-512, with ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2.
"""

import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from callboard import LLM, SamplingParams
from engine.kernels.panels import PanelKind, products
from engine.layers.packing import LinearKernel
from engine.plugins.linear import fbgemm_fp16, fbgemm_int8, onednn
from engine.plugins.linear.panels import Panels

SHAPES = ("3072x1024", "1024x3072", "864x256")
ROWS = (1, 8, 16, 64, 512)
BATCHES = (1, 8, 32)
# name -> (model.quantization, plugins.linear)
CHOICES = {
    "float32": ("none", "onednn"),
    "auto": ("none", "auto"),
    "float16": ("float16", "auto"),
    "int8": ("int8", "auto"),
}
OUTPUT_TOKENS = 64
TEXT_CHARACTERS = 3000  # of each text that is scored: about a thousand tokens
MAX_TURNS = 100


def kernels() -> dict[str, LinearKernel]:
    """The first is what the others are compared with."""
    functions = products()
    assert functions is not None, "there is no C compiler, or no AVX2"
    return {
        "onednn": onednn.OneDNN(4),
        "panels, float32": Panels(functions, PanelKind.FLOATS, 4.0),
        "panels, bfloat16": Panels(functions, PanelKind.UPPER_HALVES, 2.0),
        "panels, float16": Panels(functions, PanelKind.HALVES, 2.0),
        "panels, int8": Panels(functions, PanelKind.BYTES, 1.1),
        "panels, int8, 16-bit input": Panels(functions, PanelKind.FINE_BYTES, 1.1),
        "fbgemm_fp16": fbgemm_fp16.Fp16(exact=False, one_thread=torch.get_num_threads() == 1),
        "fbgemm_fp16 by schema": fbgemm_fp16.Fp16(exact=False, one_thread=False),
        "fbgemm_int8": fbgemm_int8.FbgemmInt8(),
    }


def measure_products(outputs: int, inputs: int, rows: int, ring_bytes: int) -> dict[str, dict[str, float]]:
    """Kernel -> microseconds, times faster than the first, relative error."""
    ring = max(2, ring_bytes // (outputs * inputs * 4))
    weights = [torch.randn(outputs, inputs).bfloat16().float() for _ in range(ring)]
    x = torch.randn(rows, inputs)
    packed = {name: [kernel.pack(weight) for weight in weights] for name, kernel in kernels().items()}
    seconds: dict[str, list[float]] = {name: [] for name in packed}
    for turn in range(max(7, min(MAX_TURNS, int(2e9 / (outputs * inputs * 4) / max(rows, 8))))):
        for name, weights_of in packed.items():
            start = time.process_time()
            _call(weights_of[turn % ring], x)
            seconds[name].append(time.process_time() - start)
    expected = x.double() @ weights[0].double().t()
    first = next(iter(seconds))
    return {
        name: {
            "us": statistics.median(values) * 1e6,
            "x": _ratio(seconds[first], values),
            "error": float((_call(packed[name][0], x).double() - expected).norm() / expected.norm()),
        }
        for name, values in seconds.items()
    }


def _call(product: Callable[[Tensor, Tensor | None], Tensor] | None, x: Tensor) -> Tensor:
    assert product is not None
    return product(x, None)


def _ratio(slower: list[float], faster: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(slower, faster, strict=True))


def held_out(num_texts: int) -> list[str]:
    """Beginnings of files of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size > 4 * TEXT_CHARACTERS]
    return [path.read_text()[:TEXT_CHARACTERS] for path in paths[:num_texts]]


def perplexity(llm: LLM, texts: list[str]) -> float:
    """Of all tokens but the first of each text."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    logprobs: list[float] = []
    for text in texts:
        deltas = list(llm.stream(text, params))
        logprobs += [one.sampled.logprob for delta in deltas for one in delta.prompt_logprobs[1:]]
    return math.exp(-statistics.fmean(logprobs))


def measure_models(model: str, batches: list[int], turns: int, num_texts: int, threads: int) -> list[dict[str, object]]:
    """A row for each choice: tokens per CPU second and times those of the first at each batch size, perplexity.

    start_s is the CPU time until it serves.  All are open at the same time and take turns."""
    rows: list[dict[str, object]] = []
    opened: dict[str, LLM] = {}
    try:
        for name, (quantization, linear) in CHOICES.items():
            start = time.process_time()
            config = {
                "model": {"quantization": quantization},
                "plugins": {"linear": linear},
                "device": {"kind": "cpu", "threads": threads},
                "kv": {"num_pages": 64 + max(batches) * 32, "memory_fraction": 0.2},
            }
            opened[name] = LLM(model, progress=False, config=config)
            rows.append({"choice": name, "start_s": time.process_time() - start})
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for batch in batches:
            seconds: dict[str, list[float]] = {name: [] for name in opened}
            for _ in range(turns + 1):  # the first one warms up
                for name, llm in opened.items():
                    start = time.process_time()
                    llm.generate([[1 + number, 40, 41] for number in range(batch)], params)
                    seconds[name].append(time.process_time() - start)
            first = next(iter(seconds))
            for row in rows:
                mine = seconds[str(row["choice"])][1:]
                row[f"tokens/s at {batch}"] = batch * OUTPUT_TOKENS / statistics.median(mine)
                row[f"x at {batch}"] = _ratio(seconds[first][1:], mine)
        texts = held_out(num_texts)
        for row in rows:
            row["perplexity"] = perplexity(opened[str(row["choice"])], texts)
    finally:
        for llm in opened.values():
            llm.close()
    return rows


def main() -> None:
    """Print both tables; optionally keep them as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="demo", help="checkpoint directory, GGUF file or 'demo'")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of the input")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="requests at once")
    parser.add_argument("--turns", type=int, default=5, help="of each model at each batch size")
    parser.add_argument("--texts", type=int, default=8, help="files of the standard library that are scored")
    parser.add_argument("--ring-mb", type=int, default=96, help="weights of one shape that take turns")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.set_num_threads(arguments.threads)
    machine = f"{torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads"
    table = Table("shape", "rows", "kernel", "us", "x", "error", title=f"products; {machine}", padding=(0, 1))
    measured_products = []
    with torch.inference_mode():
        for shape in arguments.shapes:
            outputs, inputs = map(int, shape.split("x"))
            for rows in arguments.rows:
                measured = measure_products(outputs, inputs, rows, arguments.ring_mb << 20)
                measured_products.append({"shape": shape, "rows": rows, "kernels": measured})
                for name, one in measured.items():
                    numbers = (f"{one['us']:.0f}", f"{one['x']:.2f}", f"{one['error']:.1e}")
                    table.add_row(shape, str(rows), name, *numbers)
    console.print(table)
    models = measure_models(arguments.model, arguments.batches, arguments.turns, arguments.texts, arguments.threads)
    title = f"{arguments.model}; {machine}; x: times the tokens/s of {models[0]['choice']}"
    table = Table(*models[0], title=title, padding=(0, 1))
    for row in models:
        table.add_row(*(one if isinstance(one, str) else f"{one:.4g}" for one in row.values()))
    console.print(table)
    keep(arguments.output, {"products": measured_products, "models": models})


if __name__ == "__main__":
    main()
