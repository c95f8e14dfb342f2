"""Granite 3 (Granite Team, IBM 2024): Llama with constant factors on embedding, scores, residual updates and logits."""

import msgspec

from engine.checkpoints.reading import alike, decoder, pre_norm, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, PartShape, Scaling, Unchanged
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GraniteForCausalLM": "granite"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    factor = fields.number("residual_multiplier", 1.0)
    update: PartShape = Unchanged() if factor == 1.0 else Scaling(factor=factor)
    layer = msgspec.structs.replace(
        pre_norm(fields, attention, read_gated(fields, sizes, bias=fields.flag("mlp_bias", False))),
        behind_attention=update,
        behind_mlp=update,
    )
    return msgspec.structs.replace(
        decoder(fields, sizes, alike(fields, sizes, layer)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
