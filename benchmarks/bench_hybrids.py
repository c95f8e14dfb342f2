"""Measures hybrid models through the whole engine, beside the ``generate`` of transformers.

Shapes of published hybrids, cut to a few layers and a smaller vocabulary, with random weights.  Ways take turns: in
each, so many streams get a prompt and generate one token, and then a short prompt and many tokens.  Figures are tokens
a second of CPU time, and times those of transformers in float32 in the same turn.  callboard gets the checkpoint in
float32 and in bfloat16, of which it keeps the weights and computes in float32; "int8" rounds weights.

    OMP_NUM_THREADS=1 python benchmarks/bench_hybrids.py
    python benchmarks/bench_hybrids.py --shapes granite-4-h-1b --streams 1 --turns 3 --output results.json
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)
from transformers.utils import logging

from callboard import LLM, SamplingParams

VOCAB, SHORT = 16_384, 16
WEIGHTS = ("float32", "bfloat16", "int8")
REFERENCE = "transformers, float32"
Prompts = list[list[int]]
Way = Callable[[Prompts, int], object]


def shapes() -> dict[str, PretrainedConfig]:
    """Three layers of four with the gated delta rule, and eight of nine with Mamba 2."""
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    common = {"vocab_size": VOCAB, **special}
    delta = Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        **common,
    )
    mamba = GraniteMoeHybridConfig(
        hidden_size=1536,
        intermediate_size=4096,
        shared_intermediate_size=4096,
        num_hidden_layers=9,
        num_attention_heads=12,
        num_key_value_heads=4,
        layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 3],
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        num_local_experts=0,
        position_embedding_type="nope",
        **common,
    )
    return {"qwen3.5-0.8b": delta, "granite-4-h-1b": mamba}


def generates(model: PreTrainedModel) -> Way:
    """The way of transformers."""

    def run(prompts: Prompts, count: int) -> object:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=None)

    return run


def serves(llm: LLM) -> Way:
    """The way of callboard."""
    return lambda prompts, count: llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    )


def open_ways(
    config: PretrainedConfig, folder: Path, threads: int, opened: ExitStack, weights: Collection[str]
) -> dict[str, Way]:
    """The ways for one shape with some of ``WEIGHTS``.  The checkpoints lie below ``folder``."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ways: dict[str, Way] = {REFERENCE: generates(model)}
    model.save_pretrained(folder / "float32")
    if {*weights} & {"bfloat16", "int8"}:
        rounded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        rounded.load_state_dict(model.state_dict())
        rounded.save_pretrained(folder / "bfloat16")
        ways["transformers, bfloat16"] = generates(rounded)
    for name in weights:
        stored, quantization = ("bfloat16", "int8") if name == "int8" else (name, "none")
        tables = {
            "model": {"tokenizer": "none", "quantization": quantization},
            "device": {"kind": "cpu", "threads": threads},
            "kv": {"num_pages": 1024},
        }
        llm = opened.enter_context(LLM(folder / stored, progress=False, config=tables))
        ways[f"callboard, {name}"] = serves(llm)
    return ways


def drawn(streams: int, length: int) -> Prompts:
    """Prompts that no turn had before, so that no cache has them."""
    prompts: Prompts = torch.randint(3, VOCAB, (streams, length)).tolist()
    return prompts


def measure(ways: dict[str, Way], prompts: Prompts, count: int) -> dict[str, float]:
    """Seconds of CPU time of each way."""
    found = {}
    for name, run in ways.items():
        start = time.process_time()
        run(prompts, count)
        found[name] = time.process_time() - start
    return found


def in_turns(ways: dict[str, Way], streams: int, prompt: int, count: int, turns: int) -> list[dict[str, Any]]:
    """A row of figures for each way."""
    whole, short = [], []
    for _ in range(turns + 1):
        whole.append(measure(ways, drawn(streams, prompt), 1))
        short.append(measure(ways, drawn(streams, SHORT), count))
    rows = []
    for name in ways:
        row: dict[str, Any] = {"way": name, "streams": streams}
        for what, seconds, tokens in (
            ("prompt", whole[1:], prompt),
            ("decode", short[1:], count),
        ):  # the first warms up
            row[what] = streams * tokens / statistics.median(one[name] for one in seconds)
            row[f"{what} x"] = statistics.median(one[REFERENCE] / one[name] for one in seconds)
        rows.append(row)
    return rows


@torch.inference_mode()
def main() -> None:
    """Print a table for each shape; optionally keep them as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=[*shapes()], choices=[*shapes()])
    parser.add_argument("--weights", nargs="+", default=[*WEIGHTS], choices=WEIGHTS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=48, help="that each stream generates")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    console, results = Console(), []
    for shape in arguments.shapes:
        table = Table(title=shape)
        for column in ("way", "streams", "prompt tokens/s", "decoded tokens/s"):
            table.add_column(column)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            ways = open_ways(shapes()[shape], Path(folder), arguments.threads, opened, arguments.weights)
            for streams in arguments.streams:
                for row in in_turns(ways, streams, arguments.prompt, arguments.tokens, arguments.turns):
                    figures = (f"{row[what]:.0f} ({row[f'{what} x']:.2f})" for what in ("prompt", "decode"))
                    table.add_row(row["way"], str(streams), *figures)
                    results.append({"shape": shape, **row})
        console.print(table)
    keep(arguments.output, {"results": results})


if __name__ == "__main__":
    main()
