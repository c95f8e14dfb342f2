"""Captured steps: the tokens of an engine without graphs, what a step costs the host, steps against the roofline."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from device_rates import copied_bytes_per_s

from callboard import LLM, SamplingParams
from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.layers.attention import is_capturable
from engine.types.errors import PluginError
from gpu_sections.rows import Row, seconds_of, skipped
from gpu_sections.shapes import QWEN3_06B, QWEN3_14B
from gpu_sections.stepping import Stepping, captures, checkpoint, load, pages_each, prefill, unmeasured
from gpu_sections.trace import idle_gap_s, num_copies_in, traced

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "temperature": GREEDY.replace(temperature=0.8, seed=7),
    "cuts and penalties": GREEDY.replace(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=7),
}
ROOM = 3  # measurements' steps: one that is timed, one that is traced, and the first step before them
KEPT = 0.1  # of a runner's memory may be kept by libraries once it is gone


def tokens(
    device: torch.device,
    modes: Sequence[str] = ("decode", "breakable"),
    max_tokens: int = 64,
    num_prompts: int = 6,
    num_out: int = 40,
) -> Iterator[Row]:
    """The demo model in float32: the same tokens with every kind of graph as without, with prefix hits and chunks."""
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(num_prompts)]
    asked = {case: params.replace(max_tokens=num_out) for case, params in ASKED.items()}
    plain: list[list[list[int]]] = []
    for mode in ("off", *(modes if captures(device) else ())):
        sections: dict[str, Any] = {
            "model": {"dtype": "float32", "max_model_len": 128},
            "kv": {"num_pages": 64},
            # Steps of up to twice what is captured: some of each kind.
            "scheduler": {"prefill_chunk": 8, "max_running": num_prompts, "max_step_tokens": 2 * max_tokens},
            "graphs": {"mode": mode, "max_tokens": max_tokens},
            "plugins": unmeasured(device),
        }
        with LLM(progress=False, config={"device": {"kind": device.type}, **sections}) as llm:
            outputs = [
                [one.token_ids for one in llm.generate(prompts, params)]
                for params in (*asked.values(), asked["greedy"])
            ]
        if mode == "off":
            plain = outputs
            continue
        for case, got, expected in zip([*asked, "greedy again"], outputs, plain, strict=True):
            yield {"case": f"{mode}, {case}", "ok": got == expected}
    if not captures(device):
        yield skipped("this device captures nothing", ", ".join(modes))


def tokens_compiled(device: torch.device, **sizes: Any) -> Iterator[Row]:
    """The same with compiled pieces, of two sizes, as each is compiled by itself."""
    return tokens(device, ("compiled",), max_tokens=8, **sizes)


def decode_steps(
    device: torch.device,
    config: dict[str, Any] = QWEN3_06B,
    backends: Sequence[str] = ("triton", "flashinfer"),
    batches: Sequence[int] = (1, 8, 32, 128, 256),
    context: int = 512,
    num_steps: int = 32,
) -> Iterator[Row]:
    """Time of a step by attention backend and batch, beside the time to read what it must read.

    num_steps: of one measurement."""
    bandwidth = copied_bytes_per_s(device)
    with checkpoint(config) as path:
        for backend in backends:
            times: dict[int, float] = {}
            for mode in ("off", "decode") if captures(device) else ("off",):
                before = _taken_bytes(device)
                start = time.perf_counter()
                num_pages = max(batches) * pages_each(context, ROOM * num_steps)
                try:
                    runner = load(path, device, max(batches), num_pages, 2048, mode, backend)
                except PluginError as error:
                    # A library may be missing; this project's own kernels may not, on a GPU.
                    row = skipped(str(error)[:300], f"{backend}, {mode}")
                    yield {**row, "ok": backend != "triton" or device.type == "cpu"}
                    continue
                seconds, taken = time.perf_counter() - start, _taken_bytes(device) - before
                yield {"case": f"{backend}, {mode}, start", "ok": True, "us": seconds * 1e6, "mb": taken / 1e6}
                for row in _decode_rows(device, runner, config, bandwidth, batches, context, num_steps, times, mode):
                    yield {**row, "case": f"{backend}, {mode}, {row['case']}"}
                del runner
                kept = _taken_bytes(device) - before
                yield {"case": f"{backend}, {mode}, end", "ok": kept <= KEPT * taken, "mb": kept / 1e6}


def decode_steps_14b(device: torch.device, config: dict[str, Any] = QWEN3_14B, **sizes: Any) -> Iterator[Row]:
    """The same for Qwen3-14B's shape."""
    return decode_steps(device, config, **sizes)


def _decode_rows(
    device: torch.device,
    runner: ModelRunner,
    config: dict[str, Any],
    bandwidth: float,
    batches: Sequence[int],
    context: int,
    num_steps: int,
    times: dict[int, float],
    mode: str,
) -> Iterator[Row]:
    """Yield the rows of one runner.  times: of plain steps by batch, set in mode 'off' and compared with in others.

    A generator of its own, so that nothing here holds the runner once it is through."""
    kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    for batch in batches:
        stepping = Stepping(runner, batch, context, ROOM * num_steps, GREEDY)
        stepping.decode().collect()
        launch_s, step_s = _timed_steps(stepping, num_steps)
        floor_s = (runner._model.parameter_bytes + batch * context * kv_bytes) / bandwidth
        row: Row = {"case": f"batch {batch}", "ok": True, "us": step_s * 1e6}
        row |= {"launch_us": launch_s * 1e6, "of_floor": step_s / floor_s}
        if mode == "off":
            times[batch] = step_s
        else:
            row["of_plain"] = step_s / times[batch]
            spans = traced(partial(_timed_steps, stepping, num_steps), device)
            row["gap_us"] = idle_gap_s(spans, num_steps) * 1e6
        yield row
    if mode != "off":
        yield _copies(runner, min(8, max(batches)), context, num_steps, device)


def prefill_steps(
    device: torch.device, config: dict[str, Any] = QWEN3_06B, sizes: Sequence[int] = (64, 256, 1024, 4096)
) -> Iterator[Row]:
    """Time of one prompt in a step, piecewise graphs on and off."""
    times: dict[int, float] = {}
    with checkpoint(config) as path:
        for mode in ("off", "breakable") if captures(device) else ("off",):
            start = time.perf_counter()
            runner = load(path, device, 1, pages_each(max(sizes), 0), max(sizes), mode)
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


def _timed_steps(stepping: Stepping, num_steps: int) -> tuple[float, float]:
    """(host time of a launch, time of a step with the next one queued behind it), seconds."""
    launches = 0.0
    begin = time.perf_counter()
    before = None
    for _ in range(num_steps):
        start = time.perf_counter()
        launched = stepping.decode()
        launches += time.perf_counter() - start
        if before is not None:
            before.collect()
        before = launched
    assert before is not None
    before.collect()
    return launches / num_steps, (time.perf_counter() - begin) / num_steps


def _copies(runner: ModelRunner, num_rows: int, context: int, num_steps: int, device: torch.device) -> Row:
    """Copies to the device in steps in which no request joins, leaves or gets a page.

    None where attention is captured with the rest; one that is prepared for each replay may send what it plans."""
    stepping = Stepping(runner, num_rows, context, ROOM * num_steps, GREEDY)
    stepping.decode().collect()
    num_copies = num_copies_in(traced(lambda: [stepping.decode().collect() for _ in range(num_steps)], device))
    resident = is_capturable(runner._attention)
    how = "attention plans nothing" if resident else "attention is prepared for each"
    case = f"{num_copies} copies to the device in {num_steps} steady steps ({how})"
    return {"case": case, "ok": num_copies == 0 or not resident}


def _taken_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds on the device, once unused memory is given back."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
