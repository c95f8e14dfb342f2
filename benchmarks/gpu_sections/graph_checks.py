"""Engines with graphs next to engines without, in the model's own dtype; and what a start spends time and memory on."""

import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from engine import LLM, SamplingParams
from engine.llm import Completion
from gpu_sections.rows import Row
from gpu_sections.stepping import checkpoint, load
from gpu_sections.throughput import QWEN3_06B

MODES = {"cuda": ("off", "decode", "breakable"), "cpu": ("off", "compiled")}
PROMPT_LENS = (1, 7, 64, 200, 700)
# Between two ways of computing a step in bfloat16; tokens may part where the two likeliest are closer than that.
TOLERANCE = 0.1


def logprobs(device: torch.device) -> Iterator[Row]:
    """Qwen3-0.6B's shape, greedy: log probabilities of the sampled tokens, as long as the tokens are the same ones."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(0, QWEN3_06B["vocab_size"], length).tolist() for length in PROMPT_LENS]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2)
    plain: list[Completion] = []
    with checkpoint(QWEN3_06B) as path:
        for mode in MODES[device.type]:
            with LLM(
                path,
                progress=False,
                device={"kind": device.type},
                model_={"load_format": "dummy", "tokenizer": "none"},
                kv={"num_pages": 512},
                scheduler={"max_running": 8, "prefill_chunk": 256},
                graphs={"mode": mode, "max_tokens": 256},
            ) as llm:
                said = llm.generate(prompts, params)
            if mode == "off":
                plain = said
                continue
            compared = [_compare(one, other) for one, other in zip(said, plain, strict=True)]
            error, num_same = max(one[0] for one in compared), sum(one[1] for one in compared)
            case = f"{mode}: {num_same} of {32 * len(prompts)} tokens before the first other one"
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
    """What the engine logs, and when."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[float, str]] = []
        self._started = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.perf_counter() - self._started, record.getMessage()))


def start_up(device: torch.device) -> Iterator[Row]:
    """What a start says, with the time since it began: choices, phases, memory."""
    engine = logging.getLogger("engine")
    level = engine.level
    with checkpoint(QWEN3_06B) as path:
        for mode in MODES[device.type]:
            heard = _Heard()
            engine.addHandler(heard)
            engine.setLevel(logging.INFO)
            start = time.perf_counter()
            runner = load(path, device, 64, 0 if device.type == "cuda" else 512, 2048, mode)
            took = time.perf_counter() - start
            engine.removeHandler(heard)
            engine.setLevel(level)
            for since, line in heard.lines:
                yield {"case": f"{mode}: {line[:200]}", "ok": True, "us": since * 1e6}
            yield {"case": f"{mode}: ready", "ok": True, "us": took * 1e6}
            del runner
