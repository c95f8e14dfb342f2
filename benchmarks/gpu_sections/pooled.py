"""Prompts that end in embeddings: the same on the device as on the CPU, and how many of their tokens a second takes."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from callboard import LLM
from gpu_sections.rows import Row
from gpu_sections.shapes import QWEN3_06B
from gpu_sections.stepping import checkpoint, unmeasured

BOUND = 1e-3  # of states around 1, in float32, whose products a GPU adds up in another order
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def pools(path: Path, method: str) -> Path:
    """The checkpoint, with the files by which sentence-transformers says how it pools."""
    (path / "modules.json").write_text('[{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1"}]')
    (path / "1").mkdir()
    (path / "1" / "config.json").write_text(json.dumps({"pooling_mode": method}))
    return path


def pooled(
    device: torch.device,
    config: dict[str, Any] = QWEN3_06B,
    num_prompts: int = 64,
    prompt_len: int = 512,
    num_pages: int = 4096,
    graphs: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """A row for each way to pool, of the demo model in chunks; then the speed of a real model's shape.

    graphs: the section of that name, for all engines."""
    sections = {"kv": {"num_pages": 64}, "model": {"dtype": "float32", "max_model_len": 128}, "graphs": graphs or {}}
    prompts = [f"def function_{index}(value, other):\n    return value" for index in range(6)]
    for method in ("lasttoken", "mean"):
        found = []
        with tempfile.TemporaryDirectory() as directory:
            path = pools(Path(shutil.copytree(DEMO, directory, dirs_exist_ok=True)), method)
            for kind in ("cpu", device.type):
                plugins = unmeasured(torch.device(kind))
                more = {"device": {"kind": kind}, "scheduler": {"prefill_chunk": 8}, "plugins": plugins}
                with LLM(path, progress=False, config={**sections, **more}) as llm:
                    found.append(np.stack([one.data for one in llm.embed(prompts)]))
        error = float(np.abs(found[0] - found[1]).max())
        yield {"case": f"demo model, {method}", "ok": bool(found[0].any()) and error <= BOUND, "error": error}
    tables = {
        "model": {"load_format": "dummy", "tokenizer": "none"},
        "kv": {"num_pages": num_pages},
        "device": {"kind": device.type},
        "graphs": graphs or {},
        "scheduler": {"max_step_tokens": 8192},
        "plugins": {"race_s": 0},
    }
    drawn = np.random.default_rng(0)
    with checkpoint(config) as path, LLM(pools(Path(path), "lasttoken"), progress=False, config=tables) as llm:
        for _ in range(2):  # the second time is counted, with prompts that no cache has
            every = drawn.integers(0, config["vocab_size"], (num_prompts, prompt_len)).tolist()
            start = time.perf_counter()
            vectors = [one.data for one in llm.embed(every)]
            seconds = time.perf_counter() - start
    finite = all(bool(np.isfinite(one).all()) for one in vectors)
    rate = num_prompts * prompt_len / seconds
    yield {"case": f"{num_prompts} prompts of {prompt_len}", "ok": finite, "tokens_per_s": rate}
