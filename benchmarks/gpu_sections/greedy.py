"""The demo model through the whole engine, on the device and on the CPU."""

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from callboard import LLM, SamplingParams
from gpu_sections.rows import Row, skipped
from gpu_sections.stepping import unmeasured

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def greedy(
    device: torch.device,
    num_prompts: int = 6,
    num_out: int = 48,
    graphs: Mapping[str, Any] | None = None,
    plugins: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The demo model, float32, greedy: the same tokens as on the CPU, with prefix hits and chunks on the way.

    plugins: those of the device; the CPU has its own choice."""
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    outputs, seconds, num_accepted = [], 0.0, 0
    for kind, named in (("cpu", {}), (device.type, {**unmeasured(device), **(plugins or {})})):
        sections = {
            "plugins": named,
            "device": {"kind": kind},
            "model": {"dtype": "float32", "max_model_len": 128},
            "scheduler": {"prefill_chunk": 8, "max_running": num_prompts, "max_step_tokens": 256},
        }
        with LLM(progress=False, config={"kv": {"num_pages": 64}, "graphs": graphs or {}, **sections}) as llm:
            llm.generate(prompts, params)
            start = time.perf_counter()
            found = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            outputs.append([one.token_ids for one in found])
            num_accepted = sum(one.usage.accepted_tokens for one in found)
    row: Row = {"case": f"demo model, {num_prompts} prompts", "ok": outputs[0] == outputs[1]}
    return [row | {"tokens_per_s": num_prompts * num_out / seconds, "accepted": num_accepted}]


def speculation(device: torch.device, **sizes: Any) -> list[Row]:
    """The same with proposers, one of which is the model itself; how much they bring is not what this is for."""
    rows = []
    for name, options in (("ngram", {}), ("draft_model", {"path": str(DEMO)})):
        plugins = {"proposer": name, "options": {f"proposer.{name}": options}}
        rows += [{**row, "case": f"{row['case']}, {name}"} for row in greedy(device, plugins=plugins, **sizes)]
    return rows


def through_transformers(device: torch.device, **sizes: Any) -> list[Row]:
    """The same where transformers computes the model on the device, in graphs as they are by default."""
    if find_spec("transformers") is None:
        return [skipped("transformers is not installed")]
    return greedy(device, plugins={"models": ["transformers"]}, **sizes)
