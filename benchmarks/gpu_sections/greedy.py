"""The demo model through the whole engine, on the device and on the CPU."""

import time

import torch

from engine import LLM, SamplingParams
from gpu_sections.rows import Row


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
