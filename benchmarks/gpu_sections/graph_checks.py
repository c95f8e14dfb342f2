"""Engines with graphs next to engines without, in the model's own dtype; and what a start spends time and memory on."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from callboard import LLM, SamplingParams
from engine.llm import Completion
from gpu_sections.rows import Row
from gpu_sections.shapes import QWEN3_06B
from gpu_sections.stepping import captures, checkpoint, load

# Between two ways of computing a step in bfloat16; tokens may part where the two likeliest are closer than that.
TOLERANCE = 0.1


def modes(device: torch.device) -> tuple[str, ...]:
    """Return the values of graphs.mode: off, and those that this device has and that need no compiler."""
    return ("off", "decode", "breakable") if captures(device) else ("off",)


def ways(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return pairs of attention and graphs.mode: this project's own, and the first of the order, which may plan each
    replay; each without graphs first."""
    if not captures(device):
        return (("auto", "off"),)
    return ("triton", "off"), ("triton", "decode"), ("auto", "off"), ("auto", "breakable")


def logprobs(
    device: torch.device,
    config: dict[str, Any] = QWEN3_06B,
    prompt_lens: Sequence[int] = (1, 7, 64, 200, 700),
    num_out: int = 32,
    num_pages: int = 512,
) -> Iterator[Row]:
    """Greedy: log probabilities of the sampled tokens, as long as the tokens are the same ones."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(0, config["vocab_size"], length).tolist() for length in prompt_lens]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, logprobs=2)
    plain: list[Completion] = []
    chunk = max(prompt_lens) // 3  # so that the longest prompt takes several steps
    with checkpoint(config) as path:
        for attention, mode in ways(device):
            with LLM(
                path,
                progress=False,
                config={
                    "device": {"kind": device.type},
                    "model": {"load_format": "dummy", "tokenizer": "none"},
                    "kv": {"num_pages": num_pages},
                    "scheduler": {"max_running": len(prompts), "prefill_chunk": chunk},
                    "graphs": {"mode": mode, "max_tokens": chunk},
                    "plugins": {"race_s": 0, "attention": attention},
                },
            ) as llm:
                said = llm.generate(prompts, params)
            if mode == "off":
                plain = said
                yield {"case": f"{attention}, off: {num_out * len(prompts)} tokens", "ok": True}
                continue
            compared = [_compare(one, other) for one, other in zip(said, plain, strict=True)]
            error, num_same = max(one[0] for one in compared), sum(one[1] for one in compared)
            case = f"{attention}, {mode}: {num_same} of {num_out * len(prompts)} tokens before the first other one"
            yield {"case": case, "ok": error <= TOLERANCE, "error": error}


def _compare(one: Completion, other: Completion) -> tuple[float, int]:
    """(largest difference of log probabilities, tokens until they part), the parting's own closeness included."""
    error = 0.0
    for position, (mine, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        error = max(error, abs(mine.sampled.logprob - theirs.sampled.logprob))
        if mine.sampled.token_id != theirs.sampled.token_id:
            return error, position
    return error, len(one.logprobs)


class _Heard(logging.Handler):
    """A handler that keeps what the engine logs, and when."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[float, str]] = []
        self._started = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.perf_counter() - self._started, record.getMessage()))


def start_up(
    device: torch.device,
    config: dict[str, Any] = QWEN3_06B,
    max_rows: int = 64,
    max_step_tokens: int = 2048,
    num_pages: int = 0,
) -> Iterator[Row]:
    """Yield the lines of a start's log, with the time since it began: choices, phases, memory."""
    engine = logging.getLogger("engine")
    level = engine.level
    with checkpoint(config) as path:
        for mode in modes(device):
            heard = _Heard()
            engine.addHandler(heard)
            engine.setLevel(logging.INFO)
            start = time.perf_counter()
            runner = load(path, device, max_rows, num_pages, max_step_tokens, mode)
            took = time.perf_counter() - start
            engine.removeHandler(heard)
            engine.setLevel(level)
            for since, line in heard.lines:
                yield {"case": f"{mode}: {line[:200]}", "ok": True, "us": since * 1e6}
            yield {"case": f"{mode}: ready", "ok": True, "us": took * 1e6}
            del runner  # before the next one is loaded
