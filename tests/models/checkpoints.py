"""Tiny random checkpoints of every family, written by the reference implementation, one per config detail.

Owns: the configurations.  A new family adds its line here and is then covered by every test over ``VARIANTS``.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 259  # Prime: no number of ranks divides it.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # The default of 0.02 gives logits so flat that errors hide in them.
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(_config(LlamaConfig, changes))


def _mistral(**changes: object) -> PreTrainedModel:
    return MistralForCausalLM(_config(MistralConfig, changes))


def _qwen2(**changes: object) -> PreTrainedModel:
    return Qwen2ForCausalLM(_config(Qwen2Config, changes))


def _qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(_config(Qwen3Config, {"head_dim": 32, **changes}))


def _config(kind: type[PretrainedConfig], changes: dict[str, object]) -> PretrainedConfig:
    # Eager attention: the reference's plainest path, so that both sides do not share a fused kernel.
    return kind(**{**SIZES, **changes}, attn_implementation="eager")


VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-multi-head": lambda: _llama(num_key_value_heads=4),
    "llama-gelu": lambda: _llama(hidden_act="gelu"),
    "llama-gelu-tanh": lambda: _llama(hidden_act="gelu_pytorch_tanh"),
    "llama-head-dim": lambda: _llama(head_dim=24),
    "llama3-rope": lambda: _llama(rope_parameters=LLAMA3),
    "llama-linear-rope": lambda: _llama(rope_parameters=LINEAR),
    "mistral-window": lambda: _mistral(sliding_window=13),
    "mistral-no-window": lambda: _mistral(sliding_window=None, head_dim=32),
    "qwen2": _qwen2,
    "qwen2-tied-upper-window": lambda: _qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": _qwen3,
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3-yarn-bias": lambda: _qwen3(rope_parameters=YARN, attention_bias=True),
}


def build(variant: str) -> PreTrainedModel:
    """The reference model of a variant, with every weight random: biases and norms too."""
    torch.manual_seed(sorted(VARIANTS).index(variant))
    model = VARIANTS[variant]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def save(model: PreTrainedModel, directory: Path, sharded: bool = False) -> Path:
    """Write it the way it is published: one file, or many and an index."""
    model.save_pretrained(directory, max_shard_size="60KB" if sharded else "5GB")
    return directory


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), V] of one sequence, float32."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids of a made-up prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()
