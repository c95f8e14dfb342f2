"""Granite 4 without Mamba layers and experts (IBM 2025): Granite 3 with a merged MLP, with or without positions."""

from engine.checkpoints.reading import MAX_WIDTH, read_activation, read_rotary, read_sizes
from engine.checkpoints.shape import DecoderShape, GatedShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.granite import scaled_decoder, scaled_layer

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}}

ATTENDING = ("attention", "full_attention")


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Models with layers of Mamba or with experts are refused."""
    fields = context.fields
    kinds = fields.table.get("layer_types") or fields.table.get("layers_block_type")
    if not isinstance(kinds, list) or any(one not in ATTENDING for one in kinds):
        raise fields.error("layer_types", kinds, "attention in every layer: no layer of Mamba is served")
    if experts := fields.integer("num_local_experts", 8, minimum=0):
        raise fields.error("num_local_experts", experts, "0: the experts of this family are not served")
    sizes = read_sizes(fields)
    if len(kinds) != sizes.num_layers:
        raise fields.error("layer_types", kinds, f"a list of {sizes.num_layers} kinds")
    mlp = GatedShape(
        intermediate_size=fields.integer("shared_intermediate_size", 1024, maximum=MAX_WIDTH),
        activation=read_activation(fields),
        name="shared_mlp",
        merged="input_linear",
        down="output_linear",
    )
    has_positions = fields.text("position_embedding_type", "") == "rope"
    layer = scaled_layer(fields, sizes, read_rotary(fields, sizes) if has_positions else None, mlp)
    return scaled_decoder(fields, sizes, [layer] * sizes.num_layers)
