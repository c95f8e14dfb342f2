"""Tokens per second of a real model's shape through the whole engine."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from engine import LLM, SamplingParams
from gpu_sections.rows import Row

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def throughput(device: torch.device) -> Iterator[Row]:
    """Qwen3-0.6B's shape with random weights: output tokens per second by batch size."""
    batches, num_out = ((1, 32, 256), 64) if device.type == "cuda" else ((1,), 4)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_06B))
        sections = {"model_": {"load_format": "dummy"}, "scheduler": {"max_running": 256, "max_step_tokens": 8192}}
        with LLM(directory, progress=False, device={"kind": device.type}, **sections) as llm:
            for batch in batches:
                prompts = np.random.default_rng(batch).integers(0, 150000, (batch, 128)).tolist()
                params = SamplingParams(temperature=0.6, max_tokens=num_out, ignore_eos=True)
                start = time.perf_counter()
                llm.generate(prompts, params)
                rate = batch * num_out / (time.perf_counter() - start)
                yield {"case": f"batch {batch}, 128 in, {num_out} out", "ok": True, "tokens_per_s": rate}
