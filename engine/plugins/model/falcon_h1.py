"""Falcon-H1 (TII 2025): attention and Mamba 2 side by side in every layer, with constant factors in many places."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.mamba import read_mamba
from engine.checkpoints.reading import (
    Sizes,
    decoder,
    read_activation,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    LayerShape,
    Mamba2Shape,
    ScaledGatedShape,
    Scaling,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"FalconH1ForCausalLM": "falcon_h1"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A factor of attention's input is one of its scores, twice, and of its result."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, num_kv_heads=8)
    into = fields.number("attention_in_multiplier", 1.0)
    result = into * fields.number("attention_out_multiplier", 1.0)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    layer = LayerShape(
        attention=_attention(fields, sizes, into),
        recurrent=_mamba(fields, sizes, result),
        mlp=ScaledGatedShape(
            intermediate_size=sizes.intermediate_size,
            activation=read_activation(fields),
            bias=fields.flag("mlp_bias", False),
            name="feed_forward",
            gate_scale=gate,
        ),
        before_attention=read_norm(fields, "input_layernorm"),
        behind_attention=Scaling(factor=result),
        before_mlp=read_norm(fields, "pre_ff_layernorm"),
        behind_mlp=Scaling(factor=down),
    )
    return msgspec.structs.replace(
        decoder(fields, sizes, [layer] * sizes.num_layers, norm="model.final_layernorm"),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _attention(fields: Fields, sizes: Sizes, into: float) -> AttentionShape:
    bias = fields.flag("attention_bias", False)
    if bias and into != 1.0:
        raise fields.error("attention_bias", bias, f"false with attention_in_multiplier={into}")
    return AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        scale=into**2 * fields.number("key_multiplier", 1.0) * sizes.head_size**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def _mamba(fields: Fields, sizes: Sizes, attended: float) -> Mamba2Shape:
    """Return the Mamba layer.  attended: factor of attention's result, which the sum of both is multiplied by."""
    into = fields.number("ssm_in_multiplier", 1.0)
    mamba = read_mamba(fields, sizes.hidden_size, inner="mamba_d_ssm")
    output_bias = fields.flag("projectors_bias", False)
    if mamba.bias or output_bias:
        name = "mamba_proj_bias" if mamba.bias else "projectors_bias"
        raise fields.error(name, True, "false: constant factors and biases are not served together")
    return msgspec.structs.replace(
        mamba,
        normed=fields.flag("mamba_rms_norm", False),
        gated_first=not fields.flag("mamba_norm_before_gate", True),
        scales=tuple(into * one for one in _factors(fields, "ssm_multipliers", 5)),
        output_scale=fields.number("ssm_out_multiplier", 1.0) / attended,
    )


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Return a list of factors; 1 for each if it is missing."""
    values = fields.table.get(name) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise fields.error(name, values, f"a list of {count} positive numbers")
    return [Fields({name: one}, fields.origin).number(name) for one in values]
