"""Models with recurrent layers through the whole engine: tokens of each kind beside the CPU's, and speed."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.control.system import System
from engine.models.model import build_model
from engine.plugins.comm.local import LocalComm
from gpu_sections.rows import Row
from gpu_sections.shapes import GRANITE_4_H_TINY, QWEN35_08B, TINY_HYBRIDS
from gpu_sections.stepping import captures, checkpoint, unmeasured

PROMPT_LENGTHS = (1, 3, 17, 64, 90, 130)  # within a chunk, its borders, more than one


@contextmanager
def stored_checkpoint(config: dict[str, Any]) -> Iterator[str]:
    """Yield a directory with random weights of this shape in a file, so that every device reads the same ones."""
    with checkpoint(config) as path:
        spec = System(
            build_config(Config(), {"model": {"path": path, "load_format": "dummy", "tokenizer": "none"}})
        ).spec
        model = build_model(spec.shape, LocalComm(), torch.device("meta"), torch.float32)
        generator, tensors = torch.Generator().manual_seed(1), {}
        for one in model.slices():
            if one.source not in tensors:
                drawn = torch.randn(one.stored_shape, generator=generator)
                is_norm = len(one.stored_shape) == 1 and one.source.endswith(".weight")
                tensors[one.source] = drawn * 0.2 + 1.0 if is_norm else drawn * 0.1
        save_file(tensors, Path(path) / "model.safetensors")
        yield path


def tokens(
    device: torch.device,
    configs: Mapping[str, dict[str, Any]] = TINY_HYBRIDS,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    num_out: int = 32,
) -> Iterator[Row]:
    """Float32, greedy: the tokens of the CPU with graphs and without, in chunks, and again with cached states."""
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    modes = ("off", "decode", "breakable") if captures(device) else ("off",)
    for kind, config in configs.items():
        drawn = np.random.default_rng(3)
        prompts = [drawn.integers(0, config["vocab_size"], length).tolist() for length in lengths]
        expected: list[list[int]] = []
        with stored_checkpoint(config) as path:
            for where, mode in (("cpu", "off"), *((device.type, one) for one in modes)):
                tables = {
                    "device": {"kind": where},
                    "model": {"dtype": "float32", "tokenizer": "none"},
                    "kv": {"num_pages": 128},
                    "graphs": {"mode": mode},
                    "scheduler": {"max_running": len(prompts) - 1, "prefill_chunk": 48, "max_step_tokens": 96},
                    "plugins": unmeasured(torch.device(where)),
                }
                with LLM(path, progress=False, config=tables) as llm:
                    found = [[one.token_ids for one in llm.generate(prompts, params)] for _ in range(2)]
                if not expected:
                    expected = found[0]
                for again, outputs in zip(("", ", again"), found, strict=True):
                    same = sum(one == other for one, other in zip(outputs, expected, strict=True))
                    case = f"{kind}, {where}, graphs {mode}{again}: {same} of {len(prompts)} outputs"
                    yield {"case": case, "ok": outputs == expected}


def speed(
    device: torch.device,
    configs: Mapping[str, dict[str, Any]] = {"Qwen3.5-0.8B": QWEN35_08B, "Granite-4-H-tiny": GRANITE_4_H_TINY},
    batches: Sequence[int] = (1, 32, 128),
    prompt_len: int = 128,
    long_prompt: int = 4096,
    num_out: int = 64,
    num_pages: int = 2048,
) -> Iterator[Row]:
    """Random weights: output tokens per second by batch, the first without graphs as well, and tokens of a prompt."""
    for name, config in configs.items():
        with checkpoint(config) as path:
            for mode in ("decode", "off") if captures(device) else ("off",):
                tables = {
                    "device": {"kind": device.type},
                    "model": {"load_format": "dummy", "tokenizer": "none"},
                    "kv": {"num_pages": num_pages},
                    "graphs": {"mode": mode},
                    "scheduler": {"max_running": max(batches), "max_step_tokens": 8192},
                    "plugins": unmeasured(device),
                }
                with LLM(path, progress=False, config=tables) as llm:
                    for batch in batches if mode == "decode" else batches[:1]:
                        rate = batch * num_out / _seconds(llm, config, batch, prompt_len, num_out)
                        case = f"{name}, graphs {mode}, batch {batch}, {prompt_len} in, {num_out} out"
                        yield {"case": case, "ok": True, "tokens_per_s": rate}
                    if mode == "off":
                        rate = long_prompt / _seconds(llm, config, 1, long_prompt, 1)
                        yield {"case": f"{name}, a prompt of {long_prompt}", "ok": True, "tokens_per_s": rate}


def _seconds(llm: LLM, config: dict[str, Any], batch: int, prompt_len: int, num_out: int) -> float:
    """Return the time of the second of two batches of random prompts: kernels are compiled in the first one."""
    params, seconds = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True), 0.0
    drawn = np.random.default_rng(batch)
    for _ in range(2):
        prompts = drawn.integers(0, config["vocab_size"], (batch, prompt_len)).tolist()
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    return seconds
