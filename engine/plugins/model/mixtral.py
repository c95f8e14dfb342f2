"""Mixtral (Jiang et al. 2024): Mistral with eight experts in place of each MLP, two of them for each token."""

from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MIN_WINDOW,
    decoder,
    pre_norm,
    read_activation,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, ExpertsShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"MixtralForCausalLM": "mixtral"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  The weights of a token's experts are scaled to a sum of 1."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, num_kv_heads=8)
    num_experts = fields.integer("num_local_experts", 8, maximum=MAX_EXPERTS)
    experts = ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        expert_size=sizes.intermediate_size,
        activation=read_activation(fields),
        router=RouterShape(),
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes, theta=1_000_000.0))
    window = fields.integer("sliding_window", minimum=MIN_WINDOW) if fields.has("sliding_window") else 0
    attentions = windowed_layers(fields, sizes, attention, window, [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, experts) for one in attentions])
