"""Hunyuan without experts (Tencent 2025): Llama with normalised heads, whose norm comes after the rotation."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.query_shapes import LateNormAttentionShape
from engine.checkpoints.reading import Sizes, alike, decoder, pre_norm, read_gated, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import DecoderShape, HeadLengthShape, RotaryShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    for name, only in (("use_qk_norm", True), ("use_cla", False)):
        fields.demand(name, only, "it is how transformers computes this family")
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    attention = LateNormAttentionShape(
        **sizes.heads,
        rotary=_rotary(fields, sizes),
        head_norm=HeadLengthShape(eps=read_norm(fields, "").eps),
        query_norm="query_layernorm",
        key_norm="key_layernorm",
        qkv_bias=bias,
        output_bias=bias,
    )
    return decoder(fields, sizes, alike(fields, sizes, pre_norm(fields, attention, read_gated(fields, sizes))))


def _rotary(fields: Fields, sizes: Sizes) -> RotaryShape:
    """Return the rotary settings.  With alpha, dynamic scaling has a larger base, whatever the length."""
    rotary = read_rotary(fields, sizes)
    name = "rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters"
    scaling = fields.section(name)
    if rotary.attention_factor != 1.0:
        raise fields.error(name, scaling.table, "settings that scale no scores: heads are normalised after rotation")
    if scaling.text("rope_type", scaling.text("type", "default")) != "dynamic" or not scaling.has("alpha"):
        return rotary
    stretch = scaling.number("alpha") ** (sizes.head_size / (sizes.head_size - 2))
    return msgspec.structs.replace(rotary, theta=rotary.theta * stretch)
