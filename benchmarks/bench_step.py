"""What does a decode step cost the host, when the device and the libraries cost nothing?

The graph's replay, FlashInfer's plan and run, and the queue of the device are replaced by nothing at their border; what
is left is this project's own work between two replays.  Attention that plans nothing stands for Triton and
FlashAttention.  In a steady step nobody joins and no row gets a page; in the other one some rows get one; newcomers are
admitted in one step, without its forward pass.  Where FlashInfer is installed, as `make signatures` does without a GPU,
its own Python is timed as well, over kernels that do nothing: a layer of a step with prompts and decode rows, with the
arguments that the step's first layer put together, and by its `run` in every layer.  All figures are medians, also as
multiples of one small copy in torch.

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py --rows 256 --new-pages 16 --newcomers 64 --prompt 512
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.attention import RankAttention
from engine.execution.runner import ModelRunner
from engine.graphs import rank
from engine.graphs.device import HostDevice
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.messages import Admission, Step
from engine.plugins.attention.flashinfer.arguments import PlannedKernel
from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import PLAN_BYTES, Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.support.paging import batch_on
from engine.startup.loading import load_runner
from engine.types.params import SamplingParams

CPU = torch.device("cpu")
PAGE_SIZE = 16
MAX_LEN = 4096
WAYS = ("plans nothing", "flashinfer, no tensor cores", "flashinfer, tensor cores")
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip


class NoQueue:
    """An event, and a graph."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def replay(self) -> None: ...


class NoDevice(HostDevice):
    """See ``GraphDevice``.  What is captured is done once, and nothing is done when it is replayed."""

    captures = True

    def begin_capture(self, pool: Any, size: int) -> None: ...

    def end(self) -> NoQueue:
        return NoQueue()

    def event(self) -> NoQueue:
        return NoQueue()


class NoAttention:
    """A backend that plans nothing."""

    capturable = True

    def plan_step(self, batch: AttentionBatch) -> None: ...

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return torch.zeros_like(q_TNH)


class Wrapper:
    """One of FlashInfer's."""

    def __init__(self, *_: Any, use_tensor_cores: bool = False, **__: Any) -> None:
        self._pin_memory_int_workspace_buffer = torch.zeros(PLAN_BYTES, dtype=torch.uint8)
        self._plan_info = [0] * (15 if use_tensor_cores else 10)  # without tensor cores: no row is split

    def reset_workspace_buffer(self, *_: Tensor) -> None: ...

    def plan(self, **_: Any) -> None: ...

    def run(self, q: Tensor, pages: Any, out: Tensor) -> None:
        out.zero_()


def no_flashinfer(tensor_cores: bool, spec: Any, pool: KVPool) -> AttentionBackend:
    """The plugin's backend over a library that does nothing."""
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper,
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        decode=SimpleNamespace(fast_decode_plan=lambda wrapper, **_: None),
    )
    plans = StagingRing(BUFFERS * 2, CPU)
    setup = Setup(library, spec, pool, torch.zeros(64, dtype=torch.uint8), plans, tensor_cores, 132)
    return FlashInferAttention(setup, StagingRing(BUFFERS * 2, CPU), "fa2", ("prefill", "decode"))


def load(way: str, folder: str, num_rows: int) -> ModelRunner:
    """A rank over no device, with a tiny model."""
    sections = {
        "model": {"path": folder, "load_format": "dummy", "tokenizer": "none"},
        "device": {"kind": "cpu"},
        "kv": {"num_pages": num_rows * 4, "page_size": PAGE_SIZE},
        "scheduler": {"max_running": num_rows, "max_step_tokens": max(num_rows, 2048)},
        "graphs": {"mode": "decode"},
    }

    def build(self: RankAttention, pool: KVPool) -> AttentionBackend:
        return NoAttention() if way == WAYS[0] else no_flashinfer(way == WAYS[2], self._spec, pool)

    system = System(build_config(Config(), sections))
    with patch.object(rank, "device_for_graphs", lambda _: NoDevice()), patch.object(RankAttention, "build", build):
        return load_runner(system.config, system.spec, system.max_len, system.engine.plugins, rank=0, progress=False)


def median_us(run: Callable[[int], object], times: int, before: Callable[[int], object] = lambda _: None) -> float:
    """Microseconds of ``run(number)``; ``before`` is not counted."""
    taken = []
    for number in range(times):
        before(number)
        start = time.perf_counter()
        run(number)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def decode_us(runner: ModelRunner, num_rows: int, num_pages: int, times: int) -> float:
    """A step of all rows, ``num_pages`` of which come to their next page and are given it."""
    rows = np.arange(num_rows, dtype=np.int32)
    computed = runner._rows.computed
    base = np.full(num_rows, 10 * PAGE_SIZE, dtype=np.int32)

    def step(number: int) -> Step:
        grown = (rows[:num_pages] + number * num_pages) % num_rows
        pages = (
            {"table_rows": grown, "table_indexes": np.full(num_pages, 10), "table_pages": grown} if num_pages else {}
        )
        return Step(
            step_id=number, decode_rows=rows.tobytes(), **{name: int32(column) for name, column in pages.items()}
        )

    steps = [step(number) for number in range(times)]

    def before(number: int) -> None:
        computed[:num_rows] = base - 3
        if num_pages:  # their next token is the first of a page
            computed[(rows[:num_pages] + number * num_pages) % num_rows] = base[0]

    return median_us(lambda number: runner.launch(steps[number]), times, before)


def admit_us(
    runner: ModelRunner, newcomers: int, prompt: int, params: SamplingParams, times: int
) -> tuple[float, float]:
    """All of them in one step; and a step for each of them."""
    tokens, pages = int32(np.arange(prompt) % 200), int32(np.arange(-(-prompt // PAGE_SIZE)))
    admissions = [
        Admission(
            row=row,
            token_ids=tokens,
            num_prompt_tokens=prompt,
            num_computed_tokens=0,
            pages=pages,
            params=params.replace(seed=row),
        )
        for row in range(newcomers)
    ]
    together = Step(step_id=0, admissions=tuple(admissions))
    alone = [Step(step_id=0, admissions=(one,)) for one in admissions]
    return (
        median_us(lambda _: runner._apply(together), times),
        # Each by itself: on a busy machine something else would have its turn within a longer measurement.
        newcomers * median_us(lambda number: runner._apply(alone[number % newcomers]), times * 10),
    )


def layer_us(times: int) -> dict[str, float]:
    """A layer of 8 decode rows and a prompt of 256 tokens in FlashInfer's own Python; {} if it is not installed."""
    if find_spec("flashinfer") is None:
        return {}
    library, empty = import_module("flashinfer"), torch.empty
    nothing = SimpleNamespace(
        plan=lambda *_: [0] * 15, run=lambda *_: None, paged_run=lambda *_: None, workspace_size=None
    )
    spec = AttentionSpec(28, 16, 8, 128, 128**-0.5)
    pool = KVPool(spec.num_layers, 40, PAGE_SIZE, spec.num_kv_heads, spec.head_size, torch.bfloat16, CPU)
    lengths = np.array([100] * 8 + [256], np.int32)
    queries = np.array([1] * 8 + [256], np.int32)
    batch = batch_on(CPU, 8, np.zeros((9, 16), np.int32), lengths, queries)
    q_TNH = torch.zeros((int(queries.sum()), spec.num_heads, spec.head_size), dtype=torch.bfloat16)
    found = {}
    with (
        patch.object(torch, "empty", lambda *sizes, pin_memory=False, **others: empty(*sizes, **others)),
        patch.object(torch.cuda, "device", lambda _: nullcontext()),
        patch.object(library.decode, "get_batch_decode_module", lambda *_: nothing),
        patch.object(library.prefill, "get_batch_prefill_module", lambda *_: nothing),
    ):
        rings = [StagingRing(BUFFERS * 2, CPU) for _ in range(2)]
        setup = Setup(library, spec, pool, torch.zeros(64, dtype=torch.uint8), rings[0], False, 132)
        attention = FlashInferAttention(setup, rings[1], "fa2", ("prefill", "decode"))
        out_TNH = torch.zeros_like(q_TNH)

        def layers(_: int) -> None:
            for layer in range(spec.num_layers):
                attention.attend_into(layer, q_TNH, out_TNH)

        def by_run(kernel: PlannedKernel, q_TNH: Tensor, pages: Any, out_TNH: Tensor) -> None:
            kernel._wrapper.run(q_TNH, pages, out=out_TNH)

        for name, call in (("run of every layer", by_run), ("arguments of the step", PlannedKernel.__call__)):
            with patch.object(PlannedKernel, "__call__", call):
                us = median_us(layers, times, lambda _: attention.plan_step(batch))
            found[f"flashinfer's own Python, a layer: {name}"] = us / spec.num_layers
    return found


def int32(numbers: Any) -> bytes:
    return np.asarray(numbers, dtype=np.int32).tobytes()


@torch.inference_mode()
def main() -> None:
    """Print the table; optionally keep it as JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-pages", type=int, default=16)
    parser.add_argument("--newcomers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--times", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source, target = torch.zeros(1), torch.zeros(1)
    copy = median_us(lambda _: [target.copy_(source) for _ in range(100)], 200) / 100
    results: dict[str, float] = {"one copy": copy}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for way in WAYS:
            runner = load(way, folder, arguments.rows)
            greedy = SamplingParams(temperature=0.0, ignore_eos=True)
            admit_us(runner, arguments.rows, 16, greedy, 1)
            for name, num_pages in (("steady", 0), (f"{arguments.new_pages} new pages", arguments.new_pages)):
                results[f"{way}: {name}"] = decode_us(runner, arguments.rows, num_pages, arguments.times)
        for name, params in (
            ("greedy", greedy),
            ("top_p", SamplingParams(temperature=0.7, top_p=0.9)),
            ("a penalty", SamplingParams(presence_penalty=0.5)),
        ):
            packed, alone = admit_us(runner, arguments.newcomers, arguments.prompt, params, arguments.times // 10)
            results[f"{arguments.newcomers} newcomers, {name}: one step"] = packed
            results[f"{arguments.newcomers} newcomers, {name}: a step each"] = alone
    results |= layer_us(arguments.times)
    table = Table("what", "us", "copies")
    for name, value in results.items():
        table.add_row(name, f"{value:.2f}" if value < 10 else f"{value:.0f}", f"{value / copy:.0f}")
    Console().print(table)
    keep(arguments.output, {"us": results})


if __name__ == "__main__":
    main()
