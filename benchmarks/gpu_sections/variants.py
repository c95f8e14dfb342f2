"""Decodes of a real model's shape in several ways, each beside the plain one: drafts, float8, adapters.

Weights are random.  A model that drafts for itself guesses right, so 'of plain' is 1 less what drafting, verifying and
its launches cost besides: k drafted tokens and one verification take k + 1 passes, and give k + 1 tokens.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.control.system import System
from engine.features.lora.files import AdapterRules, adaptable_modules, read_adapter
from engine.messages import RequestOptions
from gpu_sections.adapters import write_adapter
from gpu_sections.hybrids import stored_checkpoint
from gpu_sections.rows import Row
from gpu_sections.shapes import QWEN3_06B, QWEN3_8B
from gpu_sections.stepping import checkpoint, unmeasured

PROMPT_LEN = 128
FLOAT8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
RANK = 16


def drafts(
    device: torch.device,
    config: Mapping[str, Any] = QWEN3_06B,
    batches: Sequence[int] = (1, 8, 32),
    num_out: int = 129,
    prompt_len: int = PROMPT_LEN,
) -> Iterator[Row]:
    """Output tokens per second with three drafted tokens by the model itself, and without."""
    with stored_checkpoint(dict(config)) as path:  # so that both read the same weights
        options = {"proposer.draft_model": {"path": path}}
        ways = {"plain": {}, "drafts of its own": {"proposer": "draft_model", "options": options}}
        tried = {name: (path, {"plugins": plugins}) for name, plugins in ways.items()}
        yield from _compared(device, tried, batches, num_out, prompt_len, "safetensors")


def float8(
    device: torch.device,
    config: Mapping[str, Any] = QWEN3_8B,
    batches: Sequence[int] = (1, 8, 64),
    num_out: int = 128,
    prompt_len: int = PROMPT_LEN,
) -> Iterator[Row]:
    """Output tokens per second with weights in float8 with a scale per block, and in bfloat16."""
    with checkpoint(dict(config)) as plain, checkpoint({**config, **FLOAT8}) as stored:
        yield from _compared(device, {"bfloat16": (plain, {}), "float8": (stored, {})}, batches, num_out, prompt_len)


def _compared(
    device: torch.device,
    ways: Mapping[str, tuple[str, Mapping[str, Any]]],
    batches: Sequence[int],
    num_out: int,
    prompt_len: int,
    load_format: str = "dummy",
) -> Iterator[Row]:
    """Rows of each way, a directory and its sections, with the rate over the first way's."""
    plain: dict[int, float] = {}
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    for name, (path, sections) in ways.items():
        tables = {
            **_tables(device, max(batches)),
            "model": {"load_format": load_format, "tokenizer": "none"},
            "plugins": {**unmeasured(device), **sections.get("plugins", {})},
        }
        with LLM(path, progress=False, config=tables) as llm:
            for batch in batches:
                for turn in range(2):  # what is compiled and captured late is so in the first
                    drawn = np.random.default_rng(2 * batch + turn)
                    prompts = drawn.integers(0, 500, (batch, prompt_len)).tolist()
                    start = time.perf_counter()
                    found = llm.generate(prompts, params)
                    rate = batch * num_out / (time.perf_counter() - start)
                plain.setdefault(batch, rate)
                row = {
                    "case": f"{name}, batch {batch}",
                    "ok": True,
                    "tokens_per_s": rate,
                    "of_plain": rate / plain[batch],
                }
                yield row | {"accepted": sum(one.usage.accepted_tokens for one in found)}


def adapted(
    device: torch.device,
    config: Mapping[str, Any] = QWEN3_06B,
    batches: Sequence[int] = (1, 32),
    num_adapters: int = 8,
    num_out: int = 128,
    prompt_len: int = PROMPT_LEN,
) -> Iterator[Row]:
    """Output tokens per second of requests with adapters, in turn, and of requests without."""
    with checkpoint(dict(config)) as path, TemporaryDirectory() as directory:
        found = asyncio.run(_adapted(device, path, Path(directory), batches, num_adapters, num_out, prompt_len))
    for batch, (plain, adapted) in found.items():
        yield {"case": f"no adapter, batch {batch}", "ok": True, "tokens_per_s": plain, "of_plain": 1.0}
        case = f"{min(batch, num_adapters)} adapters of rank {RANK}, batch {batch}"
        yield {"case": case, "ok": True, "tokens_per_s": adapted, "of_plain": adapted / plain}


async def _adapted(
    device: torch.device,
    path: str,
    folder: Path,
    batches: Sequence[int],
    num_adapters: int,
    num_out: int,
    prompt_len: int,
) -> dict[int, tuple[float, float]]:
    """Return for each batch the rate without adapters and with them."""
    tables = _tables(device, max(batches))
    tables |= {"lora": {"folder": str(folder), "max_adapters": num_adapters, "max_rank": RANK}}
    tables["model"] |= {"path": path}
    system = System(build_config(Config(), {**tables, "plugins": unmeasured(device)}))
    modules = adaptable_modules(system.spec.shape)
    generator = torch.Generator().manual_seed(1)
    for number in range(num_adapters):
        write_adapter(folder / f"adapter{number}", modules, RANK, generator)
    await system.start()
    try:
        rules = AdapterRules(str(folder), RANK, modules)
        adapters = [read_adapter(folder / f"adapter{number}", rules) for number in range(num_adapters)]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)

        async def rate(batch: int, with_adapters: bool) -> float:
            for turn in range(2):
                drawn = np.random.default_rng(4 * batch + 2 * turn + with_adapters)
                prompts = drawn.integers(0, 500, (batch, prompt_len)).tolist()
                start = time.perf_counter()
                parts = [adapters[index % num_adapters].parts if with_adapters else {} for index in range(batch)]
                streams = [
                    system.ingress.open(prompt, params, RequestOptions(parts=one))
                    for prompt, one in zip(prompts, parts, strict=True)
                ]
                await asyncio.gather(*(stream.collect() for stream in streams))
                seconds = time.perf_counter() - start
            return batch * num_out / seconds

        return {batch: (await rate(batch, False), await rate(batch, True)) for batch in batches}
    finally:
        await system.stop()


def _tables(device: torch.device, max_running: int) -> dict[str, Any]:
    return {
        "device": {"kind": device.type},
        "model": {"load_format": "dummy", "tokenizer": "none"},
        "kv": {"num_pages": max_running * 20},
        "graphs": {"max_tokens": 512},
        "scheduler": {"max_running": max_running, "max_step_tokens": 4096},
    }
