"""GLM-4-0414 (Zhipu 2025): norms on both sides of attention and MLP; half of each head rotates, in adjacent pairs."""

import msgspec

from engine.checkpoints.reading import alike, decoder, read_gated, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Glm4ForCausalLM": "glm4"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k and v; the output projection has no bias."""
    fields = context.fields.with_defaults(rms_norm_eps=1.5625e-7)
    sizes = read_sizes(fields, head_size=128, num_kv_heads=2)
    rotary = msgspec.structs.replace(read_rotary(fields, sizes, partial=0.5), interleaved=True)
    layer = LayerShape(
        attention=AttentionShape(**sizes.heads, rotary=rotary, qkv_bias=fields.flag("attention_bias", True)),
        mlp=read_gated(fields, sizes, merged="gate_up_proj"),
        before_attention=read_norm(fields, "input_layernorm"),
        behind_attention=read_norm(fields, "post_self_attn_layernorm"),
        before_mlp=read_norm(fields, "post_attention_layernorm"),
        behind_mlp=read_norm(fields, "post_mlp_layernorm"),
    )
    return decoder(fields, sizes, alike(fields, sizes, layer))
