"""OLMo 2 (Walsh et al. 2024): norms after attention and MLP, and over all query heads and all key heads at once."""

from engine.checkpoints.reading import alike, decoder, read_gated, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerShape, WideHeadNormShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Olmo2ForCausalLM": "olmo2"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        head_norm=WideHeadNormShape(eps=read_norm(fields, "").eps),
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = LayerShape(
        attention=attention,
        mlp=read_gated(fields, sizes),
        behind_attention=read_norm(fields, "post_attention_layernorm"),
        behind_mlp=read_norm(fields, "post_feedforward_layernorm"),
    )
    return decoder(fields, sizes, alike(fields, sizes, layer))
