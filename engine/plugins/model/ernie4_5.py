"""ERNIE 4.5 without experts (Baidu 2025): Llama with heads that rotate in adjacent pairs."""

import msgspec

from engine.checkpoints.reading import alike, decoder, pre_norm, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Ernie4_5ForCausalLM": "ernie4_5"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  use_bias applies to every projection."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, head_size=128, num_kv_heads=2)
    rotary = msgspec.structs.replace(read_rotary(fields, sizes, theta=500_000.0), interleaved=True)
    bias = fields.flag("use_bias", False)
    attention = AttentionShape(**sizes.heads, rotary=rotary, qkv_bias=bias, output_bias=bias)
    layer = pre_norm(fields, attention, read_gated(fields, sizes, bias=bias))
    return decoder(fields, sizes, alike(fields, sizes, layer), tied=True)
