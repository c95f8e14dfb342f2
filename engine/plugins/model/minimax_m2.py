"""MiniMax M2 (MiniMax 2025): experts chosen by bias-corrected sigmoids; queries and keys are normalised over all heads.

Half of each head rotates."""

from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_HEADS,
    alike,
    decoder,
    pre_norm,
    read_activation,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, ExpertsShape, RouterShape, WideHeadNormShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"MiniMaxM2ForCausalLM": "minimax_m2"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  rotary_dim is the number of a head's elements that rotate; a missing one means all."""
    fields = context.fields
    fields.choice("scoring_func", "sigmoid", ("sigmoid",))
    fields.choice("qk_norm_type", "per_layer", ("per_layer",))
    for name in ("use_qk_norm", "use_routing_bias"):
        fields.demand(name, True, "it is how transformers computes this family")
    sizes = read_sizes(fields, head_size=128, num_kv_heads=8)
    partial = fields.integer("rotary_dim", sizes.head_size, maximum=MAX_HEADS) / sizes.head_size
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes, theta=5_000_000.0, partial=partial),
        head_norm=WideHeadNormShape(eps=read_norm(fields, "").eps),
    )
    num_experts = fields.integer("num_local_experts", 256, maximum=MAX_EXPERTS)
    experts = ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 8, maximum=num_experts),
        expert_size=sizes.intermediate_size,
        activation=read_activation(fields),
        router=RouterShape(scoring="sigmoid", corrected=True, correction="e_score_correction_bias"),
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return decoder(fields, sizes, alike(fields, sizes, pre_norm(fields, attention, experts)))
