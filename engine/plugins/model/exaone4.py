"""EXAONE 4.0 (LG AI Research 2025): norms after attention and MLP, normalised heads, windows on three of four layers.

With windows, the full layers have no positions."""

import msgspec

from engine.checkpoints.reading import (
    MIN_WINDOW,
    decoder,
    read_gated,
    read_layer_types,
    read_norm,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, HeadNormShape, LayerShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Exaone4ForCausalLM": "exaone4"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A null sliding_window is full attention in every layer, with positions."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, num_kv_heads=32)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        head_norm=HeadNormShape(eps=read_norm(fields, "").eps),
    )
    window, windowed = 0, [False] * sizes.num_layers
    if not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
        # Files with a pattern of letters have layer_types as well.
        period = 4 if fields.has("layer_types") else fields.integer("sliding_window_pattern", 4)
        windowed = read_layer_types(fields, sizes, [(layer + 1) % period != 0 for layer in range(sizes.num_layers)])
    attentions = windowed_layers(fields, sizes, attention, window, windowed)
    layers = [
        LayerShape(
            attention=one if is_local or not window else msgspec.structs.replace(one, rotary=None),
            mlp=read_gated(fields, sizes),
            behind_attention=read_norm(fields, "post_attention_layernorm"),
            behind_mlp=read_norm(fields, "post_feedforward_layernorm"),
        )
        for one, is_local in zip(attentions, windowed, strict=True)
    ]
    return decoder(fields, sizes, layers)
