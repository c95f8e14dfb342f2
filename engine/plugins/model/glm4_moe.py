"""GLM-4.5, 4.6 and 4.7 (Zhipu 2025): grouped queries, and DeepSeek-V3's experts; half of each head rotates.

Released files have a layer for multi-token prediction after the last layer, which ``proposer.mtp`` reads."""

from engine.checkpoints.reading import read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, HeadNormShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.deepseek_v2 import grouped, read_experts, with_first_dense
from engine.plugins.model.deepseek_v3 import with_predictor

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Glm4MoeForCausalLM": "glm4_moe"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k and v; the output projection has no bias."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, num_kv_heads=8)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes, partial=0.5),
        head_norm=HeadNormShape(eps=read_norm(fields, "").eps) if fields.flag("use_qk_norm", False) else None,
        qkv_bias=fields.flag("attention_bias", False),
    )
    router = RouterShape(
        scoring="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        corrected=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        exact=True,
    )
    router = grouped(fields, router, fields.integer("n_group", 1), fields.integer("topk_group", 1))
    experts = read_experts(fields, router, number=128, shared=1, size=1408, chosen=8)
    shape = with_first_dense(fields, sizes, attention, experts, first_experts=1)
    return with_predictor(fields, shape, attention, experts)
