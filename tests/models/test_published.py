"""Checkpoints in the words of a published config.json give the tokens of transformers, which reads the same file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.plugins.families import read_model
from tests.models.checkpoints import LLAMA3, VARIANTS, build
from tests.models.published import assert_same

# Fields that only transformers 5 writes; a published file has others in their place, or leaves them to the class.
LATER = ("rope_parameters", "layer_types", "layers_block_type", "mlp_layer_types", "dtype", "transformers_version")
LATER = (*LATER, "qk_head_dim")
PLAIN = {"rope_theta": 1e6, "rope_scaling": None}
LLAMA3_WORDS = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
SHARP = {"beta_fast": 32, "beta_slow": 1, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
LONG = {"type": "longrope", "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]}
LONG |= {"short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0]}
LAST_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
MINIMAX = {
    "use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1, 1, 1], "scoring_func": "sigmoid",
    "use_routing_bias": True, "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
    "shared_intermediate_size": 0, "rotary_dim": 8, "rope_theta": 5e6, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
DEEPSEEK = {
    "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1, "aux_loss_alpha": 0.001,
    "num_nextn_predict_layers": 1, "rope_theta": 10000,
    "rope_scaling": {**SHARP, "original_max_position_embeddings": 128},
}  # fmt: skip
KIMI = {
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4
    },
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
    "mla_use_nope": True, "rope_theta": 10000.0, "num_nextn_predict_layers": 0, "head_dim": 16,
}  # fmt: skip
GRANITE = {
    "layer_types": ["attention"] * 3, "normalization_function": "rmsnorm", "mamba_d_conv": 4, "mamba_d_state": 256,
    "num_experts_per_tok": 0, **PLAIN,
}  # fmt: skip
# Name -> the variant that is stored, changes to its settings, and what its config.json says in its own words.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Apertus": (
        "apertus",
        {},
        {"rope_theta": 12e6, "rope_scaling": LLAMA3_WORDS, "qk_norm": True, "post_norm": False, "mlp_bias": False},
    ),
    "DeepSeek V3.2": ("deepseek-v32", {}, DEEPSEEK),
    "DeepSeek V3.1": ("deepseek-v3", {"attention_bias": False}, DEEPSEEK),
    "ERNIE 4.5": ("ernie4-5", {"use_bias": False}, {**PLAIN, "compression_ratio": 1.0, "use_flash_attention": False}),
    "EXAONE 4": (
        "exaone4",
        {},
        {"layer_types": LAST_FULL, "sliding_window_pattern": "LLG", "rope_theta": 1e6, "rope_scaling": LLAMA3_WORDS},
    ),
    "GLM-4.5": ("glm4-moe", {}, {**PLAIN, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1}),
    "Granite 4": ("granite4-dense", {}, GRANITE),
    "Granite 4 H": ("granite4-hybrid-experts", {}, {"layer_types": ["mamba", "attention", "mamba"], **PLAIN}),
    "Hunyuan": (
        "hunyuan",
        {"tie_word_embeddings": True},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {**SHARP, "alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
            "use_qk_norm": True,
            "use_cla": False,
            "cla_share_factor": 2,
            "attention_head_dim": 16,
        },
    ),
    "LFM2": (
        "lfm2",
        {},
        {"full_attn_idxs": [1], "block_ff_dim": 120, "rope_theta": 1e6, "tie_embedding": True, "use_pos_enc": True},
    ),
    "Llama 3.1": ("llama3-rope", {}, {"rope_theta": 5e5, "rope_scaling": LLAMA3_WORDS, "pretraining_tp": 1}),
    "Kimi-Linear": ("kimi-linear", {}, KIMI),
    "MiniMax M2": ("minimax-m2", {}, MINIMAX),
    "Nemotron": (
        "nemotron",
        {"mlp_bias": False, "attention_bias": False},
        {"rope_theta": 10000, "partial_rotary_factor": 0.5, "kv_channels": None, "rope_scaling": None},
    ),
    "Nemotron-H": ("nemotron-h", {}, {"hybrid_override_pattern": "M-M*--M", "rope_theta": 10000}),
    "OLMo 3": (
        "olmo3",
        {},
        {
            "layer_types": LAST_FULL,
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.1386,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "Phi-4-mini": (
        "phi4-longrope",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {
            "rope_theta": 10000.0,
            "rope_scaling": LONG,
            "partial_rotary_factor": 0.75,
            "sliding_window": 262144,
            "interpolate_factor": 1,
            "full_attn_mod": 1,
            "lm_head_bias": False,
        },
    ),
    "Qwen3-Next": (
        "qwen3-next",
        {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], "mlp_only_layers": []},
        {**PLAIN, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "decoder_sparse_step": 1},
    ),
    "Qwen3 MoE": ("qwen3-moe", {"mlp_only_layers": []}, {**PLAIN, "decoder_sparse_step": 1, "max_window_layers": 3}),
}


# MiniMax-Text-01 as its first files have it; transformers knows the same model under other words.
TEXT_01 = {
    "model_type": "minimax_text_01", "architectures": ["MiniMaxText01ForCausalLM"], "attn_type_list": [0, 1, 0],
    "postnorm": True, "shared_intermediate_size": [0], "rotary_dim": 16, "rope_theta": 1e6,
    "layernorm_full_attention_alpha": 3.5, "layernorm_full_attention_beta": 1.2,
    "layernorm_linear_attention_alpha": 3.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 2.5, "layernorm_mlp_beta": 0.8,
}  # fmt: skip


# Fields whose place others take in a published file.
REPLACED = {"Kimi-Linear": ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")}


def publish(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the checkpoint."""
    variant, changes, words = KINDS[kind]
    family, settings = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, variant, (family, settings | changes))
    build(variant).save_pretrained(directory)
    path = directory / "config.json"
    left_out = (*LATER, *REPLACED.get(kind, ()))
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in left_out}
    path.write_text(json.dumps(config | {"torch_dtype": "bfloat16"} | words))


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_config_means_what_it_means_to_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(kind, tmp_path, monkeypatch)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    if KINDS[kind][2].get("num_nextn_predict_layers"):
        path = tmp_path / "model.safetensors"
        behind = {f"model.layers.3.{name}.weight": torch.zeros(4) for name in ("enorm", "eh_proj", "shared_head.norm")}
        save_file(load_file(path) | behind, path)
    assert_same(tmp_path, reference.eval())


def test_the_first_files_of_minimax_text_01(tmp_path: Path) -> None:
    reference = build("minimax")
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    table = {name: one for name, one in json.loads(path.read_text()).items() if not name.endswith("_factor")}
    words = {name: one for name, one in table.items() if name not in LATER} | TEXT_01
    path.write_text(json.dumps(words))
    assert_same(tmp_path, reference)
    path.write_text(json.dumps(words | {"rotary_dim": 8}))
    assert read_model(tmp_path).shape.attentions[0].rotary.size == 8
