"""Tiny random checkpoints of every family, written by the reference implementation, one per config detail.

Owns: the configurations.  A new family adds its line here and is then covered by every test over ``VARIANTS``.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.layouts import publish_as

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
SHARP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
TEMPERED_YARN = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.25,
}
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
}
# The embedding times 8 makes scores so large that either implementation is 1e-4 off the exact logits.
CALM = {"initializer_range": 0.1}
GEMMA3_ROTARY = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2_SIZES = {"vocab_size": VOCAB, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
LAST_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

# Variant -> the reference's class, without its "Config" and "ForCausalLM", and what its configuration has beside SIZES.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": DYNAMIC}),
    "mistral-window": ("Mistral", {"sliding_window": 13}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-upper-window": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn-bias": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN, "attention_bias": True}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
}
NOT_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 24, **CALM}),
    "gemma2-no-caps": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 512,
            **CALM,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 11, "layer_types": LAST_FULL, "rope_parameters": GEMMA3_ROTARY},
    ),
    "phi3": ("Phi3", {"sliding_window": 17}),
    "phi4-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere-head-norms": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt2": ("GPT2", GPT2_SIZES),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT_SIZES,
            "q_lora_rank": None,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": SHARP_YARN,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT_SIZES,
            "q_lora_rank": 24,
            "attention_bias": True,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": SHARP_YARN,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}
LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4-5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 11, "layer_types": LAST_FULL}),
    "exaone4-no-window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granite4-dense": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "mamba_n_heads": 64,
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 11,
            "layer_types": LAST_FULL,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "nemotron": ("Nemotron", {"head_dim": 16, "mlp_bias": True, "attention_bias": True}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": {**DYNAMIC, "alpha": 1000.0}}),
    "minimax-m2": (
        "MiniMaxM2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": TEMPERED_YARN},
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT_SIZES,
            "q_lora_rank": 24,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "rope_parameters": TEMPERED_YARN,
            "attention_bias": True,
        },
    ),
    "deepseek-v32": (
        "DeepseekV32",
        {
            **LATENT_SIZES,
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": SHARP_YARN,
            "index_topk": 128,
            "index_head_dim": 16,
            "index_n_heads": 2,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**LATENT_SIZES, "q_lora_rank": 24, "n_routed_experts": 6, "n_shared_experts": 1, "rope_parameters": YARN},
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {
            **LATENT_SIZES,
            "q_lora_rank": 24,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "index_topk": 128,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 80,
            "intermediate_size": 48,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4-one-expert": (
        "Llama4",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 80,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 512,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
}
# Families with recurrent layers.
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": CONVOLUTIONS, "block_multiple_of": 32, "intermediate_size": 120}),
    "lfm2-biases": (
        "Lfm2",
        {
            "layer_types": CONVOLUTIONS,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": CONVOLUTIONS,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
}
NEMOTRON_KINDS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "mlp", "linear_attention"]
NEMOTRON_SIZES = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "initializer_range": 0.1,
}
DELTA_SIZES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    # With 0.2 the reference is 7e-4 off the exact logits, which its chunks of 64 tokens add up; token by token 1e-4.
    "initializer_range": 0.05,
}
EXPERT_SIZES = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
HYBRID |= {
    "qwen3-next": ("Qwen3Next", {**DELTA_SIZES, **EXPERT_SIZES, "mlp_only_layers": [1]}),
    "qwen3-5": ("Qwen3_5", DELTA_SIZES),
    "qwen3-5-biases": (
        "Qwen3_5",
        {**DELTA_SIZES, "linear_num_key_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-5-moe": ("Qwen3_5Moe", {**DELTA_SIZES, **EXPERT_SIZES}),
}
MAMBA_SIZES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "initializer_range": 0.1,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 6.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}
HYBRID |= {
    "granite4-hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA_SIZES,
            **GRANITE_FACTORS,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    "granite4-hybrid-experts": (
        "GraniteMoeHybrid",
        {
            **MAMBA_SIZES,
            **GRANITE_FACTORS,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": (
        "Bamba",
        {**MAMBA_SIZES, "attn_layer_indices": [1], "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **MAMBA_SIZES,
            "mamba_d_ssm": 128,
            "mlp_multipliers": [0.8, 0.5],
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.8],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.7,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        {**MAMBA_SIZES, "mamba_d_ssm": 96, "mamba_d_head": 12, "mamba_rms_norm": True, "attention_bias": True},
    ),
    "nemotron-h": ("NemotronH", {**NEMOTRON_SIZES, "layers_block_type": NEMOTRON_KINDS}),
    "nemotron-h-experts": (
        "NemotronH",
        {
            **NEMOTRON_SIZES,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
            "use_bias": True,
        },
    ),
}
OLMO_SIZES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "initializer_range": 0.05,
}
HYBRID |= {
    "olmo-hybrid": ("OlmoHybrid", {**OLMO_SIZES, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
    "olmo-hybrid-rope": ("OlmoHybrid", {**OLMO_SIZES, "linear_allow_neg_eigval": False}),
}
MINIMAX_SIZES = {
    "head_dim": 16,
    "num_local_experts": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,
}
MINIMAX_FACTORS = {"full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 3.0, "mlp_alpha_factor": 2.5}
HYBRID |= {
    "minimax": ("MiniMax", {**MINIMAX_SIZES, **MINIMAX_FACTORS, "mlp_beta_factor": 0.8, "full_attn_beta_factor": 1.2}),
}
HYBRID["kimi-linear"] = (
    "KimiLinear",
    {
        **LATENT_SIZES,
        "num_local_experts": 6,
        "n_shared_experts": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "initializer_range": 0.1,
    },
)
GEMMA4_SIZES = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 11,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
    **CALM,
}
LAYERED: dict[str, tuple[str, dict[str, Any]]] = {
    # Inputs of each layer, and keys that the last layers, with wider MLPs, read of earlier ones.
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4_SIZES,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    # Keys that are values in full layers, which have fewer heads.
    "gemma4-equal-values": (
        "Gemma4",
        {
            **GEMMA4_SIZES,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *LAST_FULL],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    # Experts beside an MLP.
    "gemma4-experts": (
        "Gemma4",
        {
            **GEMMA4_SIZES,
            "layer_types": LAST_FULL,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
}
VARIANTS = {**PLAIN, **NOT_PLAIN, **LATER, **HYBRID, **LAYERED}
CLASSES = {
    "Llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}


def configuration(variant: str, **more: Any) -> PretrainedConfig:
    """The reference's configuration of a variant.  more: settings in the place of its own."""
    family, changes = deepcopy(VARIANTS[variant])  # some classes write into the settings that they are given
    changes |= more
    config_name, _ = CLASSES.get(family, (f"{family}Config", ""))
    # Eager attention: the reference's plainest path, so that both sides do not share a fused kernel.
    sizes = changes | {"initializer_range": 0.2} if family == "GPT2" else SIZES | changes
    config: PretrainedConfig = getattr(transformers, config_name)(**sizes, attn_implementation="eager")
    return config


def _seed(variant: str) -> int:
    """Some came later: with their places among the others, one of these would have a near tie in what it generates."""
    later = [*(name for name in sorted(VARIANTS) if name.startswith("cohere")), *LATER, *HYBRID, *LAYERED]
    return [*(name for name in sorted(VARIANTS) if name not in later), *later].index(variant)


def build(variant: str, **more: Any) -> PreTrainedModel:
    """The reference model of a variant, with every weight random: biases and norms too.  more: other settings."""
    family, _ = VARIANTS[variant]
    _, model_name = CLASSES.get(family, ("", f"{family}ForCausalLM"))
    config = configuration(variant, **more)
    torch.manual_seed(_seed(variant))
    model: PreTrainedModel = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or name.endswith("sinks"):
                weight.normal_(0, 0.2)
            elif "norm" in name or ".ln_" in name:
                weight.uniform_(0.5, 1.5)
            elif "experts" in name or "router" in name:
                weight.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.2)
    publish_as(family, model)
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
