"""Granite 4 (IBM 2025): Granite 3 with Mamba 2 in most layers, or in none, with experts beside the MLP, or without."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.mamba import read_mamba
from engine.checkpoints.reading import MAX_EXPERTS, MAX_WIDTH, read_activation, read_kinds, read_rotary, read_sizes
from engine.checkpoints.shape import DecoderShape, ExpertsShape, GatedShape, PartShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.granite import scaled_decoder, scaled_layer

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}}

ATTENDING, RECURRENT = ("attention", "full_attention"), ("mamba", "linear_attention")


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Without position_embedding_type attention has no positions."""
    fields = context.fields
    sizes = read_sizes(fields)
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"
    kinds = read_kinds(fields, sizes.num_layers, (*ATTENDING, *RECURRENT), name)
    has_positions = fields.text("position_embedding_type", "") == "rope"
    attending = scaled_layer(fields, sizes, read_rotary(fields, sizes) if has_positions else None, _mlp(fields))
    if all(kind in ATTENDING for kind in kinds):
        return scaled_decoder(fields, sizes, [attending] * sizes.num_layers)
    mamba = read_mamba(fields, sizes.hidden_size)
    recurrent = msgspec.structs.replace(attending, attention=None, recurrent=mamba)
    return scaled_decoder(fields, sizes, [attending if kind in ATTENDING else recurrent for kind in kinds])


def _mlp(fields: Fields) -> PartShape:
    """Return the MLP, beside which experts may be.  A GGUF file has gate and up apart, and experts one by one."""
    activation, in_stacks = read_activation(fields), fields.flag("projections_in_stacks", True)
    mlp = GatedShape(
        intermediate_size=fields.integer("shared_intermediate_size", 1024, maximum=MAX_WIDTH),
        activation=activation,
        name="shared_mlp",
        merged="input_linear" if in_stacks else "",
        down="output_linear" if in_stacks else "down_proj",
    )
    num_experts = fields.integer("num_local_experts", 8, minimum=0, maximum=MAX_EXPERTS)
    if not num_experts:
        return mlp
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        expert_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        activation=activation,
        router=RouterShape(name="router.layer"),
        beside=mlp,
        name="block_sparse_moe",
        stacked=in_stacks,
        halved=in_stacks,
        upright=in_stacks,
        stacks=("input_linear.weight", "output_linear.weight"),
    )
