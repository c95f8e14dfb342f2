"""What does int8 cost at start, per format that weights are stored in, and what would rows kept on disk save?

CPU milliseconds of one weight, in turns: "read" from the format's bytes in memory to float32, "round" to int8 rows and
scales, "pack" these into FBGEMM's layout, which cannot be stored.  A second start that finds the rows on disk would
still read them, check their CRC-32 and pack them: "kept" is that, and "x" how many times less it is than the first
three together.

    python benchmarks/bench_packing.py
"""

import argparse
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.formats import integers
from engine.plugins.linear.fbgemm_int8 import LARGEST_WEIGHT, FbgemmInt8Weight

OUTPUTS, INPUTS = 3072, 1024
GROUP = 128
BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def formats() -> dict[str, Callable[[], Tensor]]:
    """Format -> reading a weight of it; the numbers are random."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()

    scales_GO = torch.rand(INPUTS // GROUP, OUTPUTS).half()
    bfloat16, float8 = torch.randn(OUTPUTS, INPUTS).bfloat16(), torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn)
    rows, columns = words(INPUTS // 8, OUTPUTS), words(INPUTS, OUTPUTS // 8)
    zeros = words(INPUTS // GROUP, OUTPUTS // 8)
    block = (1, GROUP)
    reads: dict[str, Callable[[], Tensor]] = {
        "bfloat16": bfloat16.float,
        "fp8, blocks": lambda: integers.scaled(float8, torch.rand(OUTPUTS // 128, INPUTS // 128), None, (128, 128)),
        "awq": lambda: integers.awq(columns, zeros, scales_GO, block),
        "gptq": lambda: integers.gptq(rows, zeros, scales_GO, None, block, 4, 1),
    }
    for name in BLOCKS:
        kind = GGMLQuantizationType[name]
        size, num_bytes = GGML_QUANT_SIZES[kind]
        data = np.full((OUTPUTS, INPUTS // size * num_bytes), 0x1C, np.uint8)  # scales of 16 bits that are no NaN
        reads[f"gguf {name}"] = lambda data=data, kind=kind: torch.from_numpy(dequantize(data, kind))
    return reads


def rounded(weight_OI: Tensor) -> Tensor:
    """The integers of int8, as the kernel rounds them."""
    return (weight_OI / (weight_OI.abs().amax(1, keepdim=True) / LARGEST_WEIGHT)).round_().to(torch.int8)


def milliseconds(steps: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Least CPU time of each, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            start = time.process_time()
            step()
            taken[name].append(1e3 * (time.process_time() - start))
    return {name: min(values) for name, values in taken.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="of each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*quantized tensor creation functions.*", UserWarning)
    table = Table("stored as", "read ms", "round ms", "pack ms", "kept ms", "x", title=f"{OUTPUTS} x {INPUTS}")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "rows"
        for name, read in formats().items():
            weight = read()
            path.write_bytes(rounded(weight).numpy().tobytes())
            steps = {
                "read": read,
                "round": lambda weight=weight: rounded(weight),
                "whole": lambda weight=weight: FbgemmInt8Weight(weight),
                "kept": lambda: zlib.crc32(path.read_bytes()),
            }
            took = milliseconds(steps, arguments.turns)
            pack = took["whole"] - took["round"]
            kept = took["kept"] + pack
            numbers = (took["read"], took["round"], pack, kept, (took["read"] + took["whole"]) / kept)
            table.add_row(name, *(f"{one:.1f}" for one in numbers))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
