"""What does it cost that transformers computes a decoder on our pages, and what does a family of its own save?

One random model is stepped in three ways, in turns: by transformers alone (its SDPA attention and growing cache), by
transformers on our pages, and by callboard's own family, each with the linear kernels that a start would choose for
the checkpoint.  Times are of the CPU, so that a busy machine changes little; a turn's are divided by each other.

    OMP_NUM_THREADS=1 python benchmarks/bench_through_transformers.py
    python benchmarks/bench_through_transformers.py --hidden 256 --layers 4 --batch 1 --json results.json
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from engine.config import Config
from engine.models.loader import load_model
from engine.models.model import Model, build_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.manager import Plugins
from engine.plugins.testing.steps import Driver
from engine.settings.sections import PluginsSection
from engine.startup.linears import choose_linears

VOCAB = 8192
PAGE_SIZE = 16
Step = Callable[[], object]


def load(directory: Path, families: list[str]) -> Model:
    """The model as a rank has it, with the linear kernels that are measured to be the fastest."""
    spec = read_model(directory, PluginsSection(models=families))
    device, dtype, comm = torch.device("cpu"), torch.float32, LocalComm()
    plan = build_model(spec.shape, comm, torch.device("meta"), dtype)
    linears = choose_linears(Config(), spec, Plugins({"linear": "auto"}), plan, device)
    return load_model(spec, comm, device, dtype, "safetensors", 0, progress=False, linears=linears)


def steps_of(reference: Qwen3ForCausalLM, models: dict[str, Model], batch: int, context: int) -> dict[str, Step]:
    """A decode step of ``batch`` sequences that have ``context`` tokens, in each way."""
    prompts = torch.randint(VOCAB, (batch, context)).tolist()
    cache = DynamicCache(config=reference.config)
    reference(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)

    one = torch.zeros(batch, 1, dtype=torch.int64)
    return {"transformers": lambda: reference(one, past_key_values=cache).logits} | {
        name: _decodes(Driver(model, PAGE_SIZE, batch * (context // PAGE_SIZE + 40)), prompts)
        for name, model in models.items()
    }


def _decodes(driver: Driver, prompts: list[list[int]]) -> Step:
    driver.step({str(number): prompt for number, prompt in enumerate(prompts)}, rows="last")
    return lambda: driver.step({str(number): [0] for number in range(len(prompts))}, rows="last")


def prompts_of(reference: Qwen3ForCausalLM, models: dict[str, Model], batch: int, length: int) -> dict[str, Step]:
    """The prompts of ``batch`` sequences in one step, in each way."""
    prompts = torch.randint(VOCAB, (batch, length))
    named = {str(number): prompt for number, prompt in enumerate(prompts.tolist())}

    def on_pages(model: Model) -> Step:
        return lambda: Driver(model, PAGE_SIZE, batch * (length // PAGE_SIZE + 1)).step(named, rows="last")

    return {"transformers": lambda: reference(prompts, use_cache=True, logits_to_keep=1)} | {
        name: on_pages(model) for name, model in models.items()
    }


def measure(ways: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Seconds of CPU of each way, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, step in ways.items():
            start = time.process_time()
            step()
            if turn:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt that is measured")
    parser.add_argument("--stored", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the checkpoint")
    parser.add_argument("--turns", type=int, default=25)
    arguments = parser.parse_args()
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 128,
        head_dim=64,
        attn_implementation="sdpa",
    )
    logging.disable_progress_bar()
    reference = Qwen3ForCausalLM(config).eval()
    results = []
    table = Table("step", "batch", "transformers ms", "through it ms", "native ms", "through it", "native")
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        reference.to(getattr(torch, arguments.stored)).save_pretrained(directory)
        reference.to(torch.float32)
        models = {"through": load(Path(directory), ["transformers"]), "native": load(Path(directory), [])}
        for batch in arguments.batch:
            for what, ways in (
                ("decode", steps_of(reference, models, batch, arguments.context)),
                ("prompt", prompts_of(reference, models, batch, arguments.prompt)),
            ):
                seconds = measure(ways, arguments.turns)
                medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
                faster = {
                    name: statistics.median(one / own for one, own in zip(seconds["transformers"], own_s, strict=True))
                    for name, own_s in seconds.items()
                }
                results.append({"step": what, "batch": batch, "ms": medians, "times_as_fast_as_transformers": faster})
                table.add_row(
                    what,
                    str(batch),
                    *(f"{one:.1f}" for one in medians.values()),
                    *(f"{faster[name]:.2f}x" for name in models),
                )
    threads = torch.get_num_threads()
    console = Console()
    console.print(table)
    console.print(f"{threads} threads; x: times as fast as transformers alone, in the same turns")
    facts = {"threads": threads, "arguments": vars(arguments) | {"output": None}}
    keep(arguments.output, facts | {"results": results})


if __name__ == "__main__":
    main()
