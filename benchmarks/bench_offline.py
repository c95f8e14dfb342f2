"""Output tokens per second of the offline engine, beside transformers' ``generate``.

Both run in this process on the same weights, in the same dtype, with the same threads, in turns, and greedy with EOS
ignored, so that both produce exactly the asked-for tokens.  The table shows medians over the turns and their ratio.

    python benchmarks/bench_offline.py                      # demo model and a Qwen3-0.6B shape, batch 1 and 8
    python benchmarks/bench_offline.py --models demo --turns 5
    python benchmarks/bench_offline.py --models qwen3-moe           # a mixture of experts
    python benchmarks/bench_offline.py --table --batches 1 8 16 32  # precisions, memory, start, perplexity: by CPU time
    python benchmarks/bench_offline.py --table --llama-python VENV/bin/python # beside llama.cpp, of the wheel xllamacpp
    python benchmarks/bench_offline.py --job qwen3-0.6b qwen3-14b   # on a GPU: the standard job beside its roofline
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import model_table
import torch
from bench_quantization import held_out
from machine import keep, new_parser
from offline_job import SHAPES, run_job
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from callboard import LLM, SamplingParams
from server.extensions.bench import llama_cpp

NUM_TEXTS = 4  # that are scored
DEMO_MODEL = Path(__file__).parent.parent / "examples" / "demo_model"


def qwen3_06b_shape(directory: Path, layers: int = 28) -> None:
    """A checkpoint with the shape of Qwen3-0.6B; 1.2 GB with all layers."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    torch.manual_seed(0)
    save(Qwen3ForCausalLM(config), directory)


def qwen3_moe_shape(directory: Path) -> None:
    """The same with the experts of Qwen3-30B-A3B, 8 of 128 for each token: half as wide, in 3 layers of 48; 1 GB."""
    config = Qwen3MoeConfig(
        vocab_size=32768,
        hidden_size=1024,
        moe_intermediate_size=384,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    torch.manual_seed(0)
    save(Qwen3MoeForCausalLM(config), directory)


def save(model: PreTrainedModel, directory: Path) -> None:
    """Save it in bfloat16, with the demo model's tokenizer; the weights are random."""
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO_MODEL / name).read_bytes())


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def run_transformers(model: Any, prompts: torch.Tensor, output_len: int) -> None:
    """A static batch, which is the best case for ``generate``: equal lengths, all finish together."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )


def compare(
    directory: Path, label: str, batches: list[int], *, prompt_len: int, output_len: int, turns: int, threads: int
) -> list[dict[str, Any]]:
    """Time both engines in turns; one row per batch size."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    vocab_size = reference.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    rows = []
    sections = {"kv": {"num_pages": 1024}, "model": {"dtype": "float32"}, "device": {"threads": threads}}
    torch.set_num_threads(threads)
    with LLM(directory, progress=False, config=sections) as llm:
        for batch in batches:
            ours, theirs = [], []
            for turn in tqdm(range(turns + 1), desc=f"{label} batch {batch}", leave=False):
                # New prompts every turn: nothing of them is in the prefix cache.
                generator = torch.Generator().manual_seed(1000 * batch + turn)
                prompts = torch.randint(0, vocab_size, (batch, prompt_len), generator=generator)
                first = seconds(partial(llm.generate, prompts.tolist(), params))
                second = seconds(partial(run_transformers, reference, prompts, output_len))
                if turn:  # the first turn warms both up
                    ours.append(batch * output_len / first)
                    theirs.append(batch * output_len / second)
            rows.append(
                {
                    "model": label,
                    "threads": threads,
                    "batch": batch,
                    "prompt_tokens": prompt_len,
                    "output_tokens": output_len,
                    "callboard_tokens_per_s": round(statistics.median(ours), 2),
                    "transformers_tokens_per_s": round(statistics.median(theirs), 2),
                    "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
                }
            )
    del reference
    gc.collect()
    return rows


def run_jobs(names: list[str], device: str, num_sequences: int, longest: int) -> list[dict[str, Any]]:
    """The standard offline job for each shape, beside the bound that this machine sets."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(run_job(name, Path(directory), device, num_sequences, longest))
    table = Table(title=f"{num_sequences} sequences, up to {longest} tokens in and {longest} out")
    columns = ("model", "output_tokens", "seconds", "tokens_per_s", "bound_tokens_per_s", "share_of_bound", "startup_s")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)
    return rows


def run_table(
    names: list[str],
    engines: list[str],
    batches: list[int],
    turns: int,
    path: Path | None,
    llama: list[str],
    layers: int,
    threads: int,
) -> dict[str, list[dict[str, Any]]]:
    """``model_table.py`` for the demo model and others.

    path: of a plot, or None.  llama: what runs llama.cpp, or [].  layers: of Qwen3-0.6B's shape."""
    shapes = {"qwen3-0.6b": partial(qwen3_06b_shape, layers=layers), "qwen3-moe": qwen3_moe_shape}
    known = {"demo": (DEMO_MODEL, 256, turns, held_out(NUM_TEXTS))}
    known |= {name: (write, 8, min(turns, 2), []) for name, write in shapes.items()}
    tables = model_table.run({name: known[name] for name in names}, engines, batches, llama, threads)
    if path is not None:
        model_table.plot(tables, path)
    return tables


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=["demo", "qwen3-0.6b", "qwen3-moe"], default=["demo", "qwen3-0.6b"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--turns", type=int, default=3, help="timed turns for each engine (default: 3)")
    cores = len(os.sched_getaffinity(0))
    threads_help = f"threads of each engine (default: {cores}, and 1 for --table)"
    parser.add_argument("--threads", type=int, default=0, help=threads_help)
    parser.add_argument("--table", action="store_true", help="the table of precisions instead")
    parser.add_argument("--plot", type=Path, help="write a PNG of it; needs matplotlib")
    all_engines = list(model_table.ENGINES)
    parser.add_argument("--engines", nargs="+", choices=all_engines, default=all_engines, help="of --table")
    parser.add_argument("--layers", type=int, default=28, help="of Qwen3-0.6B's shape, for --table (default: all)")
    parser.add_argument("--llama-server", default="", help="llama.cpp's binary, for --table (default: of the PATH)")
    parser.add_argument("--llama-python", default=sys.executable, help="else an interpreter that has xllamacpp")
    parser.add_argument("--job", nargs="+", choices=list(SHAPES), help="run the standard offline job instead")
    parser.add_argument("--sequences", type=int, default=256, help="of the job (default: 256)")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and output of the job (default: 1024)")
    arguments = parser.parse_args()
    if arguments.job:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        report = run_jobs(arguments.job, device, arguments.sequences, arguments.longest)
        keep(arguments.output, {"rows": report})
        return
    transformers_logging.set_verbosity_error()
    if arguments.table:
        llama = llama_cpp.find(arguments.llama_server, arguments.llama_python)
        tables = run_table(
            arguments.models,
            arguments.engines,
            arguments.batches,
            arguments.turns,
            arguments.plot,
            llama,
            arguments.layers,
            arguments.threads or 1,
        )
        keep(arguments.output, {"tables": tables})
        return
    shared = {"batches": arguments.batches, "turns": arguments.turns, "threads": arguments.threads or cores}
    rows: list[dict[str, Any]] = []
    if "demo" in arguments.models:
        rows += compare(DEMO_MODEL, "demo", prompt_len=128, output_len=128, **shared)
    for name, write in {"qwen3-0.6b": qwen3_06b_shape, "qwen3-moe": qwen3_moe_shape}.items():
        if name in arguments.models:
            with tempfile.TemporaryDirectory() as directory:
                write(Path(directory))
                rows += compare(Path(directory), name, prompt_len=32, output_len=32, **shared)
    table = Table(title="Output tokens per second, prefill included (float32, greedy)")
    for column in ("model", "batch", "in/out", "callboard", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["batch"]),
            f"{row['prompt_tokens']}/{row['output_tokens']}",
            f"{row['callboard_tokens_per_s']:.1f}",
            f"{row['transformers_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
        )
    Console().print(table)
    keep(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
