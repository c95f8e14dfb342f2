"""Qwen3 dense (Yang et al. 2025): query and key heads are normalised before rotation."""

from engine.checkpoints.reading import decoder, pre_norm, read_gated, read_norm, read_rotary, read_sizes, upper_window
from engine.checkpoints.shape import AttentionShape, DecoderShape, HeadNormShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Qwen3ForCausalLM": "qwen3"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Head size is a setting.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields
    sizes = read_sizes(fields, head_size=128)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        head_norm=HeadNormShape(eps=read_norm(fields, "").eps),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = read_gated(fields, sizes)
    attentions = upper_window(fields, sizes, attention)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])
