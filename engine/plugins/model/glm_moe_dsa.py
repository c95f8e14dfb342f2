"""GLM-5 (Zhipu 2026) up to the number of tokens that its indexers choose: DeepSeek-V3.2, with experts in one group."""

from dataclasses import replace

from engine.checkpoints.shape import DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model import deepseek_v32

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GlmMoeDsaForCausalLM": "glm_moe_dsa"}}

DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Layers may share an indexer, which makes no difference so far."""
    return deepseek_v32.callboard_model(replace(context, fields=context.fields.with_defaults(**DEFAULTS)))
