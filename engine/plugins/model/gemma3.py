"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with normalised heads in place of caps, five windows to one full layer.

Layers with a window have rotary frequencies of their own."""

import math

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MIN_WINDOW,
    Sizes,
    decoder,
    read_activation,
    read_layer_types,
    read_norm,
    read_sizes,
    read_stretch,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, GatedShape, HeadNormShape, RotaryShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.gemma2 import sandwich

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Gemma3ForCausalLM": "gemma3_text"}}
# Published files of models that also read images leave these out.
LEFT_OUT = {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Every sixth layer is full, unless layer_types or sliding_window_pattern set others."""
    fields = context.fields.with_defaults(**LEFT_OUT)
    sizes = read_sizes(fields, head_size=256, num_kv_heads=4)
    if fields.has("attn_logit_softcapping"):
        cap = fields.number("attn_logit_softcapping")
        raise fields.error("attn_logit_softcapping", cap, "null: transformers caps no scores of a Gemma 3")
    bias = fields.flag("attention_bias", False)
    local, whole = _rotaries(fields, sizes)
    attention = AttentionShape(
        **sizes.heads,
        rotary=whole,
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        head_norm=HeadNormShape(eps=read_norm(fields, "").eps, offset=1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = GatedShape(
        intermediate_size=sizes.intermediate_size,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
    )
    name = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
    period = fields.integer(name, 6)
    window = 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
    windowed = read_layer_types(fields, sizes, [(layer + 1) % period != 0 for layer in range(sizes.num_layers)])
    attentions = windowed_layers(fields, sizes, attention, window, windowed)
    # Local layers keep their frequencies even if the window is wider than any sequence.
    attentions = [
        msgspec.structs.replace(one, rotary=local if is_local else whole)
        for one, is_local in zip(attentions, windowed, strict=True)
    ]
    shape = decoder(fields, sizes, [sandwich(fields, one, mlp) for one in attentions], tied=True)
    return msgspec.structs.replace(
        shape,
        norm=read_norm(fields, "model.norm", offset=1.0),
        embedding_scale=math.sqrt(sizes.hidden_size),
        rounded_scale=True,
        logit_cap=fields.nullable("final_logit_softcapping", 0.0),
    )


def _rotaries(fields: Fields, sizes: Sizes) -> tuple[RotaryShape, RotaryShape]:
    """Return the rotary settings of layers with a window and of full ones; rope_scaling applies to full ones alone."""
    both = fields.section("rope_parameters")
    local, whole = both.section("sliding_attention"), both.section("full_attention")
    if fields.has("rope_scaling"):
        whole = fields.section("rope_scaling")
    theta = whole.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    return read_stretch(fields, local, sizes, local_theta), read_stretch(fields, whole, sizes, theta)
