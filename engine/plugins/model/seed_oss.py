"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and a configurable head size."""

from engine.checkpoints.reading import alike, decoder, pre_norm, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"SeedOssForCausalLM": "seed_oss"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k and v, attention_out_bias to the output projection."""
    fields = context.fields
    sizes = read_sizes(fields, head_size=128, num_kv_heads=8)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
    )
    mlp = read_gated(fields, sizes, bias=fields.flag("mlp_bias", False))
    return decoder(fields, sizes, alike(fields, sizes, pre_norm(fields, attention, mlp)))
