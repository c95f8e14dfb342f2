"""Measures recurrent layers beside the same layers of transformers.

One layer of each kind, with random weights, on one thread: a prompt of so many tokens, one row that decodes, and eight
rows, in milliseconds of processor time.  "products" are the two products of the layer alone, "in torch" is the layer
without kernels in C.  The plain torch layout of weights is used on all sides.

    python benchmarks/bench_recurrent.py
    python benchmarks/bench_recurrent.py --tokens 2048 --turns 3
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, GraniteMoeHybridConfig, Lfm2Config, Qwen3_5TextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from engine.checkpoints.shape import GatedDeltaShape, Mamba2Shape, RecurrentShape, ShortConvolutionShape
from engine.kernels.cpu import cpu_kernels
from engine.layers.kernels import LayerKernels
from engine.layers.part import build
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.plugins.comm.local import LocalComm

CPU, CONTEXT = torch.device("cpu"), 100
# Kind -> width of the model, our shape, and transformers' class, configuration and name of the cache's argument.
Kind = tuple[int, RecurrentShape, type[torch.nn.Module], Any, str]


def kinds() -> dict[str, Kind]:
    """The layers of Qwen3.5-0.8B, of Granite 4.0 H 1B and of LFM2-700M."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    delta = Qwen3_5TextConfig(hidden_size=1024, num_hidden_layers=1, layer_types=["linear_attention"], **heads)
    sizes = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
    mamba = GraniteMoeHybridConfig(hidden_size=1536, num_hidden_layers=1, layer_types=["mamba"], **sizes)
    convolution = Lfm2Config(hidden_size=1536, num_hidden_layers=1, layer_types=["conv"])
    short = ShortConvolutionShape(size=1536, taps=3)
    ours = GatedDeltaShape(num_heads=16, num_keys=16, key_size=128, value_size=128, taps=4, eps=1e-6)
    theirs = Mamba2Shape(num_heads=48, num_groups=1, head_size=64, state_size=128, taps=4, eps=1e-6)
    return {
        "gated delta rule": (1024, ours, Qwen3_5GatedDeltaNet, delta, "cache_params"),
        "Mamba 2": (1536, theirs, GraniteMoeHybridMambaLayer, mamba, "cache_params"),
        "short convolution": (1536, short, Lfm2ShortConv, convolution, "past_key_values"),
    }


def our_layer(shape: RecurrentShape, width: int, kernels: LayerKernels | None) -> RecurrentPart:
    """The layer with random weights."""
    part = build(RecurrentPart, shape, width, LocalComm(), CPU, torch.float32)
    for one in part.slices("layer"):
        one.target.normal_(0, 0.05)
    part.pack(kernels)
    return part


def our_step(part: RecurrentPart, shape: RecurrentShape, width: int, rows: int, tokens: int) -> Callable[[], object]:
    """A step of so many rows with so many new tokens each, in the middle of their sequences."""
    states = RecurrentStates([shape.states], rows, CPU)
    counts = np.full(rows, tokens, dtype=np.int32)
    x_TD = torch.randn(rows * tokens, width)

    def run() -> object:
        step = StatesOfStep(states, np.arange(rows), counts + CONTEXT, counts)
        return part.output(part.advance(x_TD, states.layers[0], step, None))

    return run


def products(part: RecurrentPart, width: int, num_tokens: int) -> Callable[[], object]:
    """The layer's two products alone."""
    x_TD, mixed_TM = torch.randn(num_tokens, width), torch.randn(num_tokens, part.outer.inputs)
    return lambda: (part.inner(x_TD), part.outer(mixed_TM))


def their_step(layer: torch.nn.Module, config: Any, cache_name: str, rows: int, tokens: int) -> Callable[[], object]:
    """The same step of transformers."""
    cache = DynamicCache(config=config)
    layer(torch.randn(rows, 2, config.hidden_size), **{cache_name: cache})
    x_BTD = torch.randn(rows, tokens, config.hidden_size)
    return lambda: layer(x_BTD, **{cache_name: cache})


def milliseconds(run: Callable[[], object], turns: int) -> float:
    """The median of some runs, after one that is not counted."""
    run()
    taken = []
    for _ in range(turns):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken) * 1e3


@torch.inference_mode()
def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = {f"prompt of {arguments.tokens}": (1, arguments.tokens), "1 row": (1, 1), "8 rows": (8, 1)}
    table = Table("layer", "state MB", "step", "callboard", "products", "in torch", "transformers")
    results = []
    for kind, (width, shape, theirs, config, cache_name) in kinds().items():
        part, other = our_layer(shape, width, cpu_kernels()), theirs(config, 0).eval()
        state_mb = sum(np.prod(sizes) for sizes in shape.states) * 4 / 1e6
        for step, (rows, tokens) in steps.items():
            turns = arguments.turns if tokens > 1 else arguments.turns * 8
            in_torch = our_layer(shape, width, None)
            found = {
                "callboard": milliseconds(our_step(part, shape, width, rows, tokens), turns),
                "products": milliseconds(products(part, width, rows * tokens), turns),
                "in torch": milliseconds(our_step(in_torch, shape, width, rows, tokens), turns),
                "transformers": milliseconds(their_step(other, config, cache_name, rows, tokens), turns),
            }
            results.append({"layer": kind, "state_mb": state_mb, "step": step, **found})
            table.add_row(kind, f"{state_mb:.2f}", step, *(f"{one:.2f}" for one in found.values()))
    Console().print(table)
    keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
