"""GLM-4.7-Flash (Zhipu 2026): DeepSeek-V3's latent attention and experts, in one group, with one dense layer."""

from dataclasses import replace

from engine.checkpoints.shape import DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model import deepseek_v3

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}}

DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape."""
    return deepseek_v3.callboard_model(replace(context, fields=context.fields.with_defaults(**DEFAULTS)))
