"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and optionally a window on the upper layers.

Every checkpoint of the family has the biases; they are not configurable."""

from engine.checkpoints.reading import decoder, pre_norm, read_gated, read_rotary, read_sizes, upper_window
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Qwen2ForCausalLM": "qwen2"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape of a Qwen2 model."""
    fields = context.fields
    sizes = read_sizes(fields)
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes), qkv_bias=True)
    mlp = read_gated(fields, sizes)
    attentions = upper_window(fields, sizes, attention)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])
