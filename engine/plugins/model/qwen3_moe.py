"""Qwen3 mixture of experts (Yang et al. 2025): Qwen3 with many small experts in place of MLPs."""

from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_WIDTH,
    decoder,
    pre_norm,
    read_activation,
    read_gated,
    read_norm,
    read_rotary,
    read_sizes,
    used_window,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, ExpertsShape, HeadNormShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Qwen3MoeForCausalLM": "qwen3_moe | qwen3_vl_moe_text"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Layers of mlp_only_layers, and those between the sparse steps, have Qwen3's MLP.

    The text decoder of Qwen3-VL has its experts in stacks."""
    fields = context.fields
    sizes = read_sizes(fields, num_kv_heads=4)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        head_norm=HeadNormShape(eps=read_norm(fields, "").eps),
        qkv_bias=bias,
        output_bias=bias,
    )
    in_stacks = fields.text("model_type", "") == "qwen3_vl_moe_text"
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"  # the name in transformers 5
    num_experts = fields.integer(name, 128, maximum=MAX_EXPERTS)
    experts = ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 8, maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size", 768, maximum=MAX_WIDTH),
        activation=read_activation(fields),
        router=RouterShape(normalised=fields.flag("norm_topk_prob", in_stacks)),
        stacked=in_stacks,
        halved=in_stacks,
    )
    dense = read_gated(fields, sizes)
    step, without = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    mlps = [experts if layer not in without and (layer + 1) % step == 0 else dense for layer in range(sizes.num_layers)]
    attentions = windowed_layers(fields, sizes, attention, used_window(fields), [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one, mlp in zip(attentions, mlps, strict=True)])
