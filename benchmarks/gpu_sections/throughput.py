"""Tokens per second of a real model's shape through the whole engine."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from callboard import LLM, SamplingParams
from gpu_sections.rows import Row
from gpu_sections.shapes import QWEN3_06B
from gpu_sections.stepping import checkpoint


def throughput(
    device: torch.device,
    config: dict[str, Any] = QWEN3_06B,
    batches: Sequence[int] = (1, 32, 256),
    prompt_len: int = 128,
    num_out: int = 64,
    num_pages: int = 0,
    graphs: Mapping[str, int] | None = None,
    numerics: str = "fast",
) -> Iterator[Row]:
    """Random weights: output tokens per second by batch size."""
    sections = {
        "model": {"load_format": "dummy", "tokenizer": "none", "numerics": numerics},
        "kv": {"num_pages": num_pages},
        "graphs": graphs or {},
        "scheduler": {"max_running": max(batches), "max_step_tokens": 8192},
    }
    with (
        checkpoint(config) as path,
        LLM(path, progress=False, config={"device": {"kind": device.type}, **sections}) as llm,
    ):
        for batch in batches:
            drawn = np.random.default_rng(batch)
            prompts = drawn.integers(0, config["vocab_size"], (batch, prompt_len)).tolist()
            params = SamplingParams(temperature=0.6, max_tokens=num_out, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params)
            rate = batch * num_out / (time.perf_counter() - start)
            yield {"case": f"batch {batch}, {prompt_len} in, {num_out} out", "ok": True, "tokens_per_s": rate}
