"""Command R and Aya (Cohere 2024): attention and MLP in parallel, after one layer norm without a bias.

Rotary pairs are adjacent, logits are scaled, and the larger models normalise each head of queries and keys."""

from msgspec.structs import replace

from engine.checkpoints.reading import alike, decoder, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, HeadLayerNormShape, LayerNormShape, LayerShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"CohereForCausalLM": "cohere"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection; the LM head is the embedding."""
    fields = context.fields
    sizes = read_sizes(fields)
    bias, eps = fields.flag("attention_bias", False), fields.number("layer_norm_eps", 1e-5)
    attention = AttentionShape(
        **sizes.heads,
        rotary=replace(read_rotary(fields, sizes, theta=500000.0), interleaved=True),
        head_norm=HeadLayerNormShape(eps=eps) if fields.flag("use_qk_norm", False) else None,
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = LayerShape(
        attention=attention,
        mlp=read_gated(fields, sizes),
        before_attention=LayerNormShape(name="input_layernorm", eps=eps, bias=False),
        parallel=True,
    )
    return replace(
        decoder(fields, sizes, alike(fields, sizes, layer), tied=True),
        norm=LayerNormShape(name="model.norm", eps=eps, bias=False),
        logit_scale=fields.number("logit_scale", 0.0625),
    )
