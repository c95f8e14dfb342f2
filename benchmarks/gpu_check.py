"""Compare every GPU path with its reference and time it: one command, one compact table, one JSON file.

    python benchmarks/gpu_check.py --output benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu --sections attention sampler greedy     # the same code without a GPU

Each section is guarded and bounded in time: one that fails or hangs is a row that says so, and the others still run.
"""

import argparse
import json
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table

from engine import LLM, SamplingParams
from engine.kv.host_pool import HostPool
from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.messages import Step
from engine.plugins.attention.torch import TorchAttention
from engine.sampling.sampler import Sampler

SECTION_TIMEOUT_S = 120.0
Row = dict[str, Any]
COLUMNS = {"error": "error", "us": "us", "tokens/s": "tokens_per_s", "GB/s": "gb_per_s", "of plain": "of_plain"}

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def attention(device: torch.device) -> list[Row]:
    """The torch backend in each dtype: a mixed batch over shuffled pages, against float64 on the CPU."""
    rows = []
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for heads, kv_heads, window in ((16, 8, 0), (40, 8, 0), (4, 4, 33)):
            error, seconds = _attention_case(device, dtype, heads, kv_heads, window)
            name = f"torch {str(dtype).removeprefix('torch.')} {heads}/{kv_heads} window {window}"
            rows.append({"case": name, "ok": error <= bound, "error": error, "us": seconds * 1e6})
    return rows


def _attention_case(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, window: int
) -> tuple[float, float]:
    page_size, head_size = 16, 128
    queries, lengths = [1, 1, 1, 40, 7], [1, 16, 300, 40, 100]
    generator = torch.Generator().manual_seed(heads + window)
    num_pages = sum(-(-length // page_size) for length in lengths)
    pool = KVPool(1, num_pages, page_size, kv_heads, head_size, dtype, device)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.zeros((len(lengths), -(-max(lengths) // page_size)), dtype=torch.int32)
    for row, length in enumerate(lengths):
        own = [order.pop() for _ in range(-(-length // page_size))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    starts = [0, *np.cumsum(queries).tolist()]
    q_TNH = torch.randn((starts[-1], heads, head_size), generator=generator).to(device, dtype)
    spec = AttentionSpec(1, heads, kv_heads, head_size, head_size**-0.5, window)
    backend = TorchAttention(spec, pool)
    backend.begin(
        AttentionBatch(
            num_decodes=3,
            page_table_BP=table.to(device),
            lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
            query_starts_B1=torch.tensor(starts, dtype=torch.int32, device=device),
            host_lengths=np.array(lengths, dtype=np.int32),
            host_query_lengths=np.array(queries, dtype=np.int32),
        )
    )
    out = backend.attend(0, q_TNH).double().cpu()
    keys, values = (slots.double().cpu() for slots in (pool.keys(0), pool.values(0)))
    error = 0.0
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = table[row, positions // page_size].long() * page_size + positions % page_size
        q_nNH = q_TNH[starts[row] : starts[row + 1]].double().cpu()
        expected = _by_definition(q_nNH, keys[slots], values[slots], head_size**-0.5, window)
        error = max(error, (out[starts[row] : starts[row + 1]] - expected).abs().max().item())
    return error, _seconds(lambda: backend.attend(0, q_TNH), device)


def _by_definition(
    q_nNH: torch.Tensor, k_LGH: torch.Tensor, v_LGH: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """softmax(q k^T) v in float64; the queries are the last positions."""
    group = q_nNH.shape[1] // k_LGH.shape[1]
    k_LNH, v_LNH = k_LGH.repeat_interleave(group, 1), v_LGH.repeat_interleave(group, 1)
    query = torch.arange(len(k_LGH) - len(q_nNH), len(k_LGH))[:, None]
    key = torch.arange(len(k_LGH))[None]
    hidden = (key > query) | ((key <= query - window) if window else torch.zeros_like(key > query))
    scores = torch.einsum("nhd,lhd->hnl", q_nNH, k_LNH).mul(scale).masked_fill(hidden, -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v_LNH)


def sampler(device: torch.device) -> list[Row]:
    """Every kind of request in one batch: the same tokens as on the CPU."""
    vocab_size, num_rows = 5000, 12
    wishes = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.0, top_k=20, seed=2),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4, logprobs=3),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={7: 5.0}, seed=5),
    ]
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0)) * 3
    results, seconds = [], 0.0
    for where in (torch.device("cpu"), device):
        one = Sampler(num_rows, vocab_size, 512, where)
        for row in range(num_rows):
            one.admit(row, wishes[row % len(wishes)], np.arange(20, dtype=np.int32) + row, 20, (2,))
        ours = logits.to(where)
        rows = np.arange(num_rows)
        tokens = [one.sample(ours, rows, np.full(num_rows, 20 + step)).token_ids_N.cpu() for step in range(8)]
        results.append(torch.stack(tokens))
        seconds = _seconds(lambda one=one, ours=ours, rows=rows: one.sample(ours, rows, np.full(num_rows, 40)), where)
    differing = int((results[0] != results[1]).sum())
    return [{"case": "mixed batch of 12", "ok": differing == 0, "error": differing, "us": seconds * 1e6}]


def host_pool(device: torch.device) -> list[Row]:
    """Pages to the host and back: equal afterwards, no wait on the way, and how fast beside one plain pinned copy."""
    num_layers, num_bytes = (28, 1 << 29) if device.type == "cuda" else (2, 1 << 23)
    rows = []
    for page_size in (1, 16, 64):
        num_pages = num_bytes // KVPool.page_bytes(num_layers, page_size, 8, 128, torch.bfloat16)
        pool = KVPool(num_layers, 2 * num_pages, page_size, 8, 128, torch.bfloat16, device)
        host = HostPool(2 * num_pages, pool)
        order = np.random.default_rng(page_size).permutation(2 * num_pages)
        rows += _host_pool_case(pool, host, f"page {page_size}, a run", np.arange(num_pages))
        rows += _host_pool_case(pool, host, f"page {page_size}, scattered", order[:num_pages])
        del pool, host  # before the next size is allocated and page-locked
    return rows


def _host_pool_case(pool: KVPool, host: HostPool, case: str, on_host: np.ndarray) -> list[Row]:
    """Both directions, from half of the pool's pages to the other half, by way of ``on_host``."""
    device = pool.data.device
    sources, targets = np.random.default_rng(0).permutation(pool.num_pages).reshape(2, -1)
    there, back = _transfer(1, sources, on_host), _transfer(0, targets, on_host)
    for step in (there, back):
        host.apply(step)  # kernels are loaded now, which may wait
    pool.data.normal_(generator=torch.Generator(device).manual_seed(0))
    expected = pool.data[:, :, sources.tolist()].cpu()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        host.apply(there)
        pool.data.zero_()  # at once: on the stream the copies must be ahead of it
        host.apply(back)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    differing = int((pool.data[:, :, targets.tolist()].cpu() != expected).sum())
    differing += int((host.data[on_host.tolist()].movedim(0, 2) != expected).sum())
    num_bytes = expected.nbytes
    ours = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rows = []
    for way, step, target, source in (("to host", there, pinned, ours), ("back", back, ours, pinned)):
        plain = _seconds(lambda target=target, source=source: target.copy_(source, non_blocking=True), device)
        seconds = _seconds(lambda step=step: host.apply(step), device)
        row = {"case": f"{case}, {way}", "ok": differing == 0, "error": differing, "us": seconds * 1e6}
        rows.append({**row, "gb_per_s": num_bytes / seconds / 1e9, "of_plain": plain / seconds})
    return rows


def _transfer(to_host: int, device_pages: np.ndarray, host_pages: np.ndarray) -> Step:
    columns = (np.full(len(host_pages), to_host), device_pages, host_pages)
    direction, on_device, on_host = (column.astype(np.int32).tobytes() for column in columns)
    return Step(0, transfer_to_host=direction, transfer_device_pages=on_device, transfer_host_pages=on_host)


def greedy(device: torch.device) -> list[Row]:
    """The demo model, float32, greedy: the same tokens as on the CPU, with prefix hits and chunks on the way."""
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outputs, seconds = [], 0.0
    for kind in ("cpu", device.type):
        sections = {"device": {"kind": kind}, "model_": {"dtype": "float32"}, "scheduler": {"prefill_chunk": 8}}
        with LLM(progress=False, kv={"num_pages": 256}, **sections) as llm:
            llm.generate(prompts, params)
            start = time.perf_counter()
            outputs.append([one.token_ids for one in llm.generate(prompts, params)])
            seconds = time.perf_counter() - start
    return [{"case": "demo model, 6 prompts", "ok": outputs[0] == outputs[1], "tokens_per_s": 6 * 48 / seconds}]


def throughput(device: torch.device) -> list[Row]:
    """Qwen3-0.6B's shape with random weights: output tokens per second by batch size."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_06B))
        sections = {"model_": {"load_format": "dummy"}, "scheduler": {"max_running": 256, "max_step_tokens": 8192}}
        with LLM(directory, progress=False, device={"kind": device.type}, **sections) as llm:
            for batch in (1, 32, 256):
                prompts = np.random.default_rng(batch).integers(0, 150000, (batch, 128)).tolist()
                params = SamplingParams(temperature=0.6, max_tokens=64, ignore_eos=True)
                start = time.perf_counter()
                llm.generate(prompts, params)
                rate = batch * 64 / (time.perf_counter() - start)
                rows.append({"case": f"batch {batch}, 128 in, 64 out", "ok": True, "tokens_per_s": rate})
    return rows


SECTIONS: dict[str, Callable[[torch.device], list[Row]]] = {
    "attention": attention,
    "sampler": sampler,
    "host_pool": host_pool,
    "greedy": greedy,
    "throughput": throughput,
}


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median of 20 calls, each waited for."""
    times = []
    for _ in range(23):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:]))


def guarded(section: Callable[[torch.device], list[Row]], device: torch.device) -> list[Row]:
    """The section's rows, or one row that says how it failed.  A section that hangs is left behind on its thread."""
    rows: list[Row] = [{"case": "(whole section)", "ok": False, "problem": f"no result in {SECTION_TIMEOUT_S:g} s"}]

    def run() -> None:
        try:
            with torch.inference_mode():
                rows[:] = section(device)
        except Exception as error:  # whatever it is, the other sections must still run
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            rows[:] = [{"case": "(whole section)", "ok": False, "problem": problem, "trace": traceback.format_exc()}]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECTION_TIMEOUT_S)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the script itself")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="write machine and rows as JSON to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu_check: torch sees no GPU; --device cpu tries the script without one\n")
    results: dict[str, list[Row]] = {}
    for name in arguments.sections:
        results[name] = guarded(SECTIONS[name], device)
    present = {key for rows in results.values() for row in rows for key in row}
    columns = {title: key for title, key in COLUMNS.items() if key in present}
    table = Table("section", "case", "", *columns, "problem")
    for name, rows in results.items():
        for row in rows:
            mark = "[green]ok[/green]" if row["ok"] else "[red]FAIL[/red]"
            cells = [f"{row[key]:.3g}" if key in row else "" for key in columns.values()]
            table.add_row(name, row["case"], mark, *cells, row.get("problem", ""))
    Console().print(table)
    if arguments.output:
        report = {"machine": describe_machine(), "torch": torch.__version__, "sections": results}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    parser.exit(0 if all(row["ok"] for rows in results.values() for row in rows) else 1)


if __name__ == "__main__":
    main()
