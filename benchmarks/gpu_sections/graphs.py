"""Captured steps: the tokens of an engine without graphs, what a step costs the host, steps against the roofline."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from device_rates import copied_bytes_per_s
from torch.profiler import ProfilerActivity, profile

from engine import LLM, SamplingParams
from engine.execution.runner import LaunchedStep
from gpu_sections.rows import Row, seconds_of
from gpu_sections.stepping import Stepping, checkpoint, load, prefill
from gpu_sections.throughput import QWEN3_06B

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "temperature": GREEDY.replace(temperature=0.8, seed=7),
    "cuts and penalties": GREEDY.replace(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=7),
}
QWEN3_14B = {
    **QWEN3_06B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}
STEPS = 32
BATCHES = (1, 8, 32, 128, 256)
MODES = {"cuda": ("off", "breakable"), "cpu": ("off",)}


def tokens(device: torch.device) -> Iterator[Row]:
    """The demo model in float32: the same tokens with every kind of graph as without, with prefix hits and chunks."""
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(6)]
    outputs: dict[str, list[list[list[int]]]] = {}
    for mode in ("off", "decode", "breakable", "compiled") if device.type == "cuda" else ("off", "compiled"):
        sections = {"model_": {"dtype": "float32"}, "scheduler": {"prefill_chunk": 8, "max_running": 6}}
        graphs = {"mode": mode, "max_tokens": 64}  # each size is compiled by itself
        with LLM(progress=False, device={"kind": device.type}, kv={"num_pages": 512}, graphs=graphs, **sections) as llm:
            outputs[mode] = [
                [one.token_ids for one in llm.generate(prompts, params)] for params in (*ASKED.values(), GREEDY)
            ]
        if mode != "off":
            for case, got, expected in zip([*ASKED, "greedy again"], outputs[mode], outputs["off"], strict=True):
                yield {"case": f"{mode}, {case}", "ok": got == expected}


def decode_steps(device: torch.device) -> Iterator[Row]:
    """Qwen3-0.6B's shape; see ``_decode_steps``."""
    return _decode_steps(device, QWEN3_06B)


def decode_steps_14b(device: torch.device) -> Iterator[Row]:
    """Qwen3-14B's shape; see ``_decode_steps``."""
    return _decode_steps(device, QWEN3_14B)


def _decode_steps(device: torch.device, config: dict[str, Any]) -> Iterator[Row]:
    """512 tokens of context: time of a step by batch, beside the time to read what it must read."""
    bandwidth = copied_bytes_per_s(device)
    kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    times: dict[tuple[str, int], float] = {}
    batches = BATCHES if device.type == "cuda" else BATCHES[:1]
    with checkpoint(config) as path:
        for mode in MODES[device.type]:
            start = time.perf_counter()
            runner = load(path, device, max(batches), max(batches) * 40, 2048, mode)
            yield {"case": f"{mode}, start", "ok": True, "us": (time.perf_counter() - start) * 1e6, **_memory(device)}
            weight_bytes = runner._model.parameter_bytes
            for batch in batches:
                stepping = Stepping(runner, batch, 512, 4 * STEPS, GREEDY)
                stepping.decode().collect()
                launch_s, step_s = _timed_steps(stepping)
                times[mode, batch] = step_s
                floor_s = (weight_bytes + batch * 512 * kv_bytes) / bandwidth
                row: Row = {"case": f"{mode}, batch {batch}", "ok": True, "us": step_s * 1e6}
                row |= {"launch_us": launch_s * 1e6, "of_floor": step_s / floor_s}
                if mode != "off":
                    row["of_plain"] = step_s / times["off", batch]
                    row["gap_us"] = _idle_gap(stepping) * 1e6
                yield row
            if mode != "off":
                yield _copies(runner)
            del runner


def prefill_steps(device: torch.device) -> Iterator[Row]:
    """Qwen3-0.6B's shape: time of one prompt in a step, piecewise graphs on and off."""
    times: dict[int, float] = {}
    sizes = (64, 256, 1024, 4096) if device.type == "cuda" else (64,)
    with checkpoint(QWEN3_06B) as path:
        for mode in MODES[device.type]:
            start = time.perf_counter()
            runner = load(path, device, 8, 512, max(sizes), mode)
            yield {"case": f"{mode}, start", "ok": True, "us": (time.perf_counter() - start) * 1e6}
            for number, num_tokens in enumerate(sizes):
                seconds = seconds_of(partial(_collected, prefill, runner, number, num_tokens), device)
                row: Row = {"case": f"{mode}, {num_tokens} tokens", "ok": True, "us": seconds * 1e6}
                if mode == "off":
                    times[num_tokens] = row["us"]
                else:
                    row["of_plain"] = row["us"] / times[num_tokens]
                yield row
            del runner


def _collected(launch: Callable[..., LaunchedStep], *arguments: object) -> object:
    return launch(*arguments).collect()


def _timed_steps(stepping: Stepping) -> tuple[float, float]:
    """(host time of a launch, time of a step with the next one queued behind it), seconds."""
    launches = 0.0
    begin = time.perf_counter()
    before = None
    for _ in range(STEPS):
        start = time.perf_counter()
        launched = stepping.decode()
        launches += time.perf_counter() - start
        if before is not None:
            before.collect()
        before = launched
    assert before is not None
    before.collect()
    return launches / STEPS, (time.perf_counter() - begin) / STEPS


def _idle_gap(stepping: Stepping) -> float:
    """Median time that the GPU has nothing to do between two steps, seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        _timed_steps(stepping)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    gaps, end = [], spans[0][1]
    for start, stop in spans:
        gaps.append(start - end)
        end = max(end, stop)
    # One between each two steps: they are the widest.
    widest = sorted(gaps)[-(STEPS - 1) :]
    return max(0.0, widest[len(widest) // 2]) * 1e-6


def _copies(runner: object) -> Row:
    """Copies to the device in steps in which nobody joins, leaves or gets a page: none."""
    stepping = Stepping(runner, 8, 64, 4 * STEPS, GREEDY)  # type: ignore[arg-type]
    stepping.decode().collect()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            stepping.decode().collect()
    num_copies = sum("HtoD" in event.name for event in trace.events())
    return {"case": f"copies to the device in {STEPS} steady steps: {num_copies}", "ok": num_copies == 0}


def _memory(device: torch.device) -> Row:
    """What this process has taken."""
    return {"mb": torch.cuda.memory_reserved() / 1e6} if device.type == "cuda" else {}
