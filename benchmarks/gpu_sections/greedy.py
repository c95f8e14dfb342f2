"""The demo model through the whole engine, on the device and on the CPU."""

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from callboard import LLM, SamplingParams
from gpu_sections.rows import Row, skipped


def greedy(
    device: torch.device,
    num_prompts: int = 6,
    num_out: int = 48,
    graphs: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
) -> list[Row]:
    """The demo model, float32, greedy: the same tokens as on the CPU, with prefix hits and chunks on the way.

    models: the families that are named on the device."""
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    outputs, seconds = [], 0.0
    for kind, families in (("cpu", ()), (device.type, models)):
        sections = {
            "plugins": {"models": list(families)},
            "device": {"kind": kind},
            "model": {"dtype": "float32", "max_model_len": 128},
            "scheduler": {"prefill_chunk": 8},
        }
        with LLM(progress=False, config={"kv": {"num_pages": 64}, "graphs": graphs or {}, **sections}) as llm:
            llm.generate(prompts, params)
            start = time.perf_counter()
            outputs.append([one.token_ids for one in llm.generate(prompts, params)])
            seconds = time.perf_counter() - start
    rate = num_prompts * num_out / seconds
    return [{"case": f"demo model, {num_prompts} prompts", "ok": outputs[0] == outputs[1], "tokens_per_s": rate}]


def through_transformers(device: torch.device, **sizes: Any) -> list[Row]:
    """The same where transformers computes the model on the device, in graphs as they are by default."""
    if find_spec("transformers") is None:
        return [skipped("transformers is not installed")]
    return greedy(device, models=("transformers",), **sizes)
