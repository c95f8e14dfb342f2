"""Gemma 2 (Gemma Team 2024): norms on both sides of attention and MLP, capped scores and logits, alternating windows.

Norms multiply by 1 + weight, the embedding is scaled by the root of its width, and the LM head is the embedding."""

import math

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MIN_WINDOW,
    decoder,
    read_activation,
    read_layer_types,
    read_norm,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, GatedShape, LayerShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Gemma2ForCausalLM": "gemma2"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Even layers have the window, unless layer_types sets others."""
    fields = context.fields
    sizes = read_sizes(fields, head_size=256, num_kv_heads=4)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=fields.nullable("attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = GatedShape(
        intermediate_size=sizes.intermediate_size,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
    )
    window = 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
    windowed = read_layer_types(fields, sizes, [layer % 2 == 0 for layer in range(sizes.num_layers)])
    attentions = windowed_layers(fields, sizes, attention, window, windowed)
    shape = decoder(fields, sizes, [sandwich(fields, one, mlp) for one in attentions], tied=True)
    return msgspec.structs.replace(
        shape,
        norm=read_norm(fields, "model.norm", offset=1.0),
        embedding_scale=math.sqrt(sizes.hidden_size),
        rounded_scale=True,
        logit_cap=fields.nullable("final_logit_softcapping", 30.0),
    )


def sandwich(fields: Fields, attention: AttentionShape, mlp: GatedShape) -> LayerShape:
    """Return a layer with norms on both sides of attention and MLP, each of 1 + weight."""
    return LayerShape(
        attention=attention,
        mlp=mlp,
        before_attention=read_norm(fields, "input_layernorm", offset=1.0),
        behind_attention=read_norm(fields, "post_attention_layernorm", offset=1.0),
        before_mlp=read_norm(fields, "pre_feedforward_layernorm", offset=1.0),
        behind_mlp=read_norm(fields, "post_feedforward_layernorm", offset=1.0),
    )
