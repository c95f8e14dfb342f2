"""The field's standard offline job, and how fast this machine could do it at most.

The job is that of ``callboard bench offline``: 142,827 tokens in and 133,966 out.
The bound is a roofline of what is timed in the same run: every step reads all weights once, every new token reads
the keys and values before it once, both at the rate of a copy; every token costs two operations per weight at the
rate of a large matrix product.  No engine reaches it: it has no launches, no attention arithmetic and no sampling.

Owns: the bound.  Does not know: how results are shown.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_rates import copied_bytes_per_s, operations_per_s

from callboard import LLM, SamplingParams
from server.extensions.bench.offline import LARGEST_ID, SEED, draw_job

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def write_shape(name: str, directory: Path) -> None:
    """A config.json for random weights of a shape of ``SHAPES``; the small ones of the family tie their embeddings."""
    config = {**COMMON, **SHAPES[name], "tie_word_embeddings": name == "qwen3-0.6b"}
    (directory / "config.json").write_text(json.dumps(config))


def run_job(name: str, directory: Path, device: str, num_sequences: int, longest: int) -> dict[str, Any]:
    """Do the job once to warm up, with other tokens, and once for the clock.  longest: 1,024 in the standard job."""
    write_shape(name, directory)
    prompts, lengths = draw_job(num_sequences, longest)
    prompt_lens, output_lens = np.array([len(prompt) for prompt in prompts]), np.array(lengths)
    params = [SamplingParams(temperature=0.6, max_tokens=int(length), ignore_eos=True) for length in output_lens]
    started = time.perf_counter()
    with LLM(
        directory,
        config={
            "device": {"kind": device},
            "model": {"load_format": "dummy", "tokenizer": "none"},
            "scheduler": {"max_running": max(num_sequences, 1), "max_step_tokens": 16384, "prefill_chunk": 2048},
        },
    ) as llm:
        startup_s = time.perf_counter() - started
        others = np.random.default_rng(SEED)
        llm.generate([others.integers(0, LARGEST_ID, len(prompt)).tolist() for prompt in prompts], params)
        started = time.perf_counter()
        llm.generate(prompts, params)
        took_s = time.perf_counter() - started
    bound = bound_s(name, prompt_lens, output_lens, torch.device(device))
    num_output = int(output_lens.sum())
    return {
        "model": name,
        "sequences": num_sequences,
        "prompt_tokens": int(prompt_lens.sum()),
        "output_tokens": num_output,
        "startup_s": round(startup_s, 1),
        "seconds": round(took_s, 2),
        "tokens_per_s": round(num_output / took_s, 1),
        "bound_tokens_per_s": round(num_output / bound, 1),
        "share_of_bound": round(bound / took_s, 3),
    }


def bound_s(name: str, prompt_lens: np.ndarray, output_lens: np.ndarray, device: torch.device) -> float:
    """Seconds that the job takes at least, if all sequences run at once: see the top of this file."""
    shape = {**COMMON, **SHAPES[name]}
    item = 4 if device.type == "cpu" else 2  # bytes: the engine computes in float32 on CPU
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads, head_size = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    per_layer = hidden * head_size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    head = hidden * shape["vocab_size"]
    kv_bytes = 2 * layers * kv_heads * head_size * item  # of one token
    # A sequence's new token number k reads the keys and values of its prompt and of the k before it.
    read_tokens = (output_lens * prompt_lens + output_lens * (output_lens - 1) // 2).sum()
    num_steps = int(output_lens.max())
    moved = num_steps * (layers * per_layer + head) * item + int(read_tokens) * kv_bytes
    rate = operations_per_s(device)
    prefill_s = 2 * int(prompt_lens.sum()) * layers * per_layer / rate
    decode_s = max(moved / copied_bytes_per_s(device), 2 * int(output_lens.sum()) * (layers * per_layer + head) / rate)
    return prefill_s + decode_s
