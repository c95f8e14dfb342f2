"""Granite 3 (Granite Team, IBM 2024): Llama with constant factors on embedding, scores, residual updates and logits."""

from collections.abc import Sequence

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import Sizes, alike, decoder, pre_norm, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    LayerShape,
    PartShape,
    RotaryShape,
    Scaling,
    Unchanged,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GraniteForCausalLM": "granite"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape of a Granite 3."""
    fields = context.fields
    sizes = read_sizes(fields)
    mlp = read_gated(fields, sizes, bias=fields.flag("mlp_bias", False))
    layers = alike(fields, sizes, scaled_layer(fields, sizes, read_rotary(fields, sizes), mlp))
    return scaled_decoder(fields, sizes, layers)


def scaled_layer(fields: Fields, sizes: Sizes, rotary: RotaryShape | None, mlp: PartShape) -> LayerShape:
    """Return a layer.  attention_bias applies to q, k, v and the output projection."""
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=rotary,
        scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    factor = fields.number("residual_multiplier", 1.0)
    update: PartShape = Unchanged() if factor == 1.0 else Scaling(factor=factor)
    return msgspec.structs.replace(pre_norm(fields, attention, mlp), behind_attention=update, behind_mlp=update)


def scaled_decoder(fields: Fields, sizes: Sizes, layers: Sequence[LayerShape]) -> DecoderShape:
    """Return the decoder around the layers."""
    return msgspec.structs.replace(
        decoder(fields, sizes, layers),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
