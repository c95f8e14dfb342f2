"""Products with weights in blocks of a GGUF file, timed beside callboard's other products and ggml's.

Every kernel multiplies the same rows by weights of its own from a ring, in turns, with one thread; a figure is the
least processor time of all turns, so that other work on the machine counts little.  ggml's kernels come from the wheel
``xllamacpp``, if it is installed, by way of ``examples/linear_ggml``.

    python benchmarks/bench_blocks.py
    python benchmarks/bench_blocks.py --shape 1536x576 --rows 1 8 --formats Q4_1 --turns 200
    python benchmarks/bench_blocks.py --layout       # laying a weight out at start, beside a copy of its bytes
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.kernels.blocks import Format, Parts, StoredWeight, block_products
from engine.kernels.panels import PanelKind, PanelWeight, products
from engine.layers.packing import PackedWeight, StoredRows

GGML_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "MXFP4": 39}
BLOCKS = dict(zip(GGML_TYPES, (18, 20, 22, 24, 34, 144, 176, 210, 17), strict=True))  # bytes of one
EXAMPLE = Path(__file__).parent.parent / "examples" / "linear_ggml"
Pack = Callable[[Tensor], PackedWeight]


def rows_of(kind: Format, weight_OI: Tensor) -> StoredRows:
    """Blocks of random bits with small scales: their values cost nothing else."""
    outputs, inputs = weight_OI.shape
    size = 256 if kind.name.endswith("_K") else 32
    blocks = np.random.default_rng(0).integers(0, 256, (outputs, inputs // size, BLOCKS[kind.name]), np.uint8)
    place = 208 if kind == Format.Q6_K else 0
    scale = [120] if kind == Format.MXFP4 else [0, 0x30, 0, 0x30]  # an exponent, or one or two halves
    blocks[..., place : place + len(scale)] = np.array(scale, np.uint8)[: BLOCKS[kind.name] - place]
    return StoredRows("random", kind.name, torch.from_numpy(blocks.reshape(outputs, -1)), inputs)


def kernels(formats: list[str]) -> Iterator[tuple[str, Pack]]:
    """(name, layout of a weight); the first is what the others are compared with."""
    panels, blocks = products(), block_products()
    if panels is None or blocks is None:
        sys.exit("there is no C compiler, or no AVX2: none of callboard's own products can be measured")
    yield "float32", lambda weight: PanelWeight(panels, weight, PanelKind.FLOATS)
    yield "bfloat16", lambda weight: PanelWeight(panels, weight.bfloat16().float(), PanelKind.UPPER_HALVES)
    yield "bfloat16 rounded", lambda weight: PanelWeight(panels, weight, PanelKind.PAIRS)
    yield "int8", lambda weight: PanelWeight(panels, weight, PanelKind.BYTES)
    for name in formats:
        for parts in (Parts.EXACT, Parts.ROUNDED):

            def pack(weight: Tensor, name: str = name, parts: Parts = parts) -> PackedWeight:
                return StoredWeight(blocks, [rows_of(Format[name], weight)], parts)

            yield f"{name} {parts.name.lower()}", pack
    yield from ggml(formats)


def ggml(formats: list[str]) -> Iterator[tuple[str, Pack]]:
    """Kernels of ggml; none without the wheel."""
    sys.path.append(str(EXAMPLE))
    try:
        from callboard_ggml.blocks import Backend, BlockWeight

        backend = Backend()
    except (ImportError, AttributeError, ValueError, OSError) as error:
        print(f"without ggml: {error}", file=sys.stderr)
        return
    for name in formats:
        yield f"{name} ggml", lambda weight, name=name: BlockWeight(backend, GGML_TYPES[name], weight)


def layouts(formats: list[str], weight: Tensor, turns: int) -> dict[str, dict[str, float]]:
    """Format -> least processor seconds of laying a weight out in blocks, and of a copy of its bytes."""
    blocks = block_products()
    if blocks is None:
        sys.exit("there is no C compiler, or no AVX2: nothing is laid out in blocks")
    stored = {name: rows_of(Format[name], weight) for name in formats}
    least: dict[str, dict[str, float]] = {}
    for _ in range(turns):
        for name, rows in stored.items():
            ways = {"layout": lambda rows=rows: StoredWeight(blocks, [rows], Parts.EXACT), "copy": rows.blocks.clone}
            for way, make in ways.items():
                start = time.process_time()
                make()
                took = time.process_time() - start
                of = least.setdefault(name, {})
                of[way] = min(took, of.get(way, took))
    table = Table("format", "laid out, ms", "times a copy", "GB/s", title=f"{len(weight)}x{weight.shape[1]}")
    for name, of in least.items():
        rate = stored[name].blocks.nbytes / of["layout"] / 1e9
        table.add_row(name, f"{1e3 * of['layout']:.2f}", f"{of['layout'] / of['copy']:.1f}", f"{rate:.2f}")
    Console(width=120).print(table)
    return least


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--layout", action="store_true", help="time laying weights out, not products")
    parser.add_argument("--shape", default="3072x1024", help="outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--formats", nargs="+", default=list(GGML_TYPES), choices=list(GGML_TYPES))
    parser.add_argument("--ring", type=int, default=16, help="weights of each kernel")
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    outputs, inputs = map(int, given.shape.split("x"))
    weight = torch.randn(outputs, inputs) / inputs**0.5
    if given.layout:
        keep(given.output, {"shape": given.shape, "seconds": layouts(given.formats, weight, given.turns)})
        return
    rings = {name: [pack(weight) for _ in range(given.ring)] for name, pack in kernels(given.formats)}
    figures: dict[str, dict[int, float]] = {name: {} for name in rings}
    for rows in given.rows:
        x = torch.randn(rows, inputs)
        for turn in range(given.turns):
            for name, ring in rings.items():
                start = time.process_time()
                for one in ring[:: 1 if rows < 64 else 4]:
                    one(x, None)
                took = (time.process_time() - start) / len(ring[:: 1 if rows < 64 else 4])
                figures[name][rows] = min(took, figures[name].get(rows, took)) if turn else took
    table = Table("kernel", *(f"{rows} rows, us (times float32's speed)" for rows in given.rows), title=given.shape)
    for name, of in figures.items():
        table.add_row(name, *(f"{1e6 * us:.0f} ({figures['float32'][rows] / us:.2f})" for rows, us in of.items()))
    Console(width=120).print(table)
    keep(given.output, {"shape": given.shape, "seconds": figures})


if __name__ == "__main__":
    main()
