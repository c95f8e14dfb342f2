"""Tiny random models of families that only transformers computes, each made by its own configuration and class.

Owns: their sizes.  ``python -m tests.models.test_families`` takes all of them through the kit, the tests a few.
"""

import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.checkpoints import SIZES, VOCAB

# What a configuration has of these, by its own names, it is given.
GIVEN: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": 13,
    "max_window_layers": 1,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Heads of latent attention: each has keys of its own, and their size follows from its parts.
IN_LATENT: dict[str, Any] = {"head_dim": None, "num_key_value_heads": 4}
PLAIN = [
        "afmoe", "arcee", "aria_text", "biogpt", "bitnet", "cohere2", "dots1",
        "ernie4_5_moe", "exaone_moe", "flex_olmo", "gemma", "glm", "gpt_bigcode", "gpt_neox",
        "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_moe", "hyperclovax", "jais2",
        "ministral", "nanochat", "olmo", "olmoe", "opt", "persimmon",
        "phi", "phimoe", "qwen2_moe", "solar_open", "stablelm", "starcoder2", "vaultgemma",
]  # fmt: skip
LATENT = ["glm4_moe_lite", "minicpm3", "youtu"]
KINDS = [*PLAIN, *LATENT]


def build_kind(kind: str, **changes: Any) -> PreTrainedModel:
    """The reference model of a model_type, with every weight random."""
    config_class = CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    given = {
        name: value
        for name, value in (GIVEN | (IN_LATENT if kind in LATENT else {}) | changes).items()
        if value is not None
    }
    always = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", *changes}
    torch.manual_seed(sum(kind.encode()))
    config = config_class(
        **{name: value for name, value in given.items() if name in known | always}, attn_implementation="eager"
    )
    model: PreTrainedModel = getattr(transformers, architecture_of(kind))(config).eval()
    assert model.get_input_embeddings().num_embeddings == VOCAB
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.dim() > 1:
                weight.normal_(0, 0.15)
    return model


def has_experts(model: PreTrainedModel) -> bool:
    """Whether tokens choose experts."""
    return any("experts" in name for name, _ in model.named_modules())


def num_ranks(kind: str) -> int:
    """How many ranks share it in the kit: one where transformers has no plan for more."""
    return 2 if CONFIG_MAPPING[kind].base_model_tp_plan else 1


def architecture_of(kind: str) -> str:
    """The class that is checked."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return names if isinstance(names, str) else names[0]
