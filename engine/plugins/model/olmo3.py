"""OLMo 3 (Ai2 2025): OLMo 2 with a window on three of four layers; only full layers have a stretched context."""

import msgspec

from engine.checkpoints.reading import (
    FULL,
    MIN_WINDOW,
    SLIDING,
    decoder,
    read_gated,
    read_layer_types,
    read_norm,
    read_sizes,
    read_stretch,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerShape, WideHeadNormShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Olmo3ForCausalLM": "olmo3"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields)
    bias, theta = fields.flag("attention_bias", False), fields.number("rope_theta", 500_000.0)
    both = fields.section("rope_parameters")
    full = fields.section("rope_scaling") if fields.has("rope_scaling") else both.section(FULL)
    local, whole = (
        read_stretch(fields, one, sizes, one.number("rope_theta", theta)) for one in (both.section(SLIDING), full)
    )
    attention = AttentionShape(
        **sizes.heads,
        rotary=whole,
        head_norm=WideHeadNormShape(eps=read_norm(fields, "").eps),
        qkv_bias=bias,
        output_bias=bias,
    )
    window = 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
    windowed = read_layer_types(fields, sizes, [(layer + 1) % 4 != 0 for layer in range(sizes.num_layers)])
    attentions = windowed_layers(fields, sizes, attention, window, windowed)
    layers = [
        LayerShape(
            attention=msgspec.structs.replace(one, rotary=local if is_local else whole),
            mlp=read_gated(fields, sizes),
            behind_attention=read_norm(fields, "post_attention_layernorm"),
            behind_mlp=read_norm(fields, "post_feedforward_layernorm"),
        )
        for one, is_local in zip(attentions, windowed, strict=True)
    ]
    return decoder(fields, sizes, layers)
