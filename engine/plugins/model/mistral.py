"""Mistral and Ministral 7B style models (Jiang et al. 2023): Llama with a sliding window on every layer, no biases."""

from engine.checkpoints.reading import (
    MIN_WINDOW,
    decoder,
    pre_norm,
    read_gated,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"MistralForCausalLM": "mistral"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A null sliding_window is full attention; a missing one is the family's default of 4096."""
    fields = context.fields
    sizes = read_sizes(fields, num_kv_heads=8)
    window = 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes))
    mlp = read_gated(fields, sizes)
    attentions = windowed_layers(fields, sizes, attention, window, [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])
