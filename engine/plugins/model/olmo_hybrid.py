"""OLMo hybrid (Ai2 2026): the gated delta rule in most layers, OLMo 3's attention, without positions, in the others."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    Sizes,
    decoder,
    read_gated,
    read_kinds,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, GatedDeltaShape, LayerShape, WideHeadNormShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.qwen3_next import ATTENTION, DELTA, read_delta

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"OlmoHybridForCausalLM": "olmo_hybrid"}}

NORM_EPS = 1e-5  # of the norm behind the rule, independent of rms_norm_eps, as in transformers


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Norms come before the rule, but behind attention; a base frequency brings positions back."""
    fields = context.fields
    sizes = read_sizes(fields)
    bias, mlp = fields.flag("attention_bias", False), read_gated(fields, sizes)
    turns = fields.section("rope_parameters").has("rope_theta") or fields.has("rope_theta")
    attending = LayerShape(
        attention=AttentionShape(
            **sizes.heads,
            rotary=read_rotary(fields, sizes) if turns else None,
            head_norm=WideHeadNormShape(eps=read_norm(fields, "").eps),
            qkv_bias=bias,
            output_bias=bias,
        ),
        mlp=mlp,
        behind_attention=read_norm(fields, "post_attention_layernorm"),
        behind_mlp=read_norm(fields, "post_feedforward_layernorm"),
    )
    recurrent = LayerShape(
        attention=None,
        recurrent=_delta(fields, sizes),
        mlp=mlp,
        before_attention=read_norm(fields, "attention_layer_norm"),
        before_mlp=read_norm(fields, "feedforward_layer_norm"),
    )
    return decoder(fields, sizes, [attending if one == ATTENTION else recurrent for one in _kinds(fields, sizes)])


def _kinds(fields: Fields, sizes: Sizes) -> list[str]:
    if fields.has("layer_types"):
        return read_kinds(fields, sizes.num_layers, (DELTA, ATTENTION))
    kinds = [DELTA if (index + 1) % 4 else ATTENTION for index in range(sizes.num_layers)]
    return kinds if ATTENTION in kinds else [*kinds[:-1], ATTENTION]


def _delta(fields: Fields, sizes: Sizes) -> GatedDeltaShape:
    heads = sizes.num_heads
    fields = fields.with_defaults(linear_num_key_heads=heads, linear_num_value_heads=heads)
    size = int(0.75 * sizes.hidden_size / fields.integer("linear_num_key_heads"))
    fields = fields.with_defaults(linear_key_head_dim=size)
    fields = fields.with_defaults(linear_value_head_dim=2 * fields.integer("linear_key_head_dim"))
    return read_delta(fields, NORM_EPS, "apart", 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0)
