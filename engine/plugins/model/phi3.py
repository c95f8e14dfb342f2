"""Phi-3, Phi-3.5, Phi-4 (Abdin et al. 2024): Llama with merged projections; maybe only a part of each head turns."""

import msgspec

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

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Phi3ForCausalLM": "phi3"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """With longrope a sequence ends at the original length: a longer one would need other keys from its start."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields)
    rotary = read_rotary(fields, sizes, partial=1.0)
    if rotary.kind == "longrope":
        sizes = msgspec.structs.replace(sizes, max_len=min(sizes.max_len, rotary.original_max_len))
    attention = AttentionShape(**sizes.heads, rotary=rotary, merged="qkv_proj")
    window = fields.integer("sliding_window", minimum=MIN_WINDOW) if fields.has("sliding_window") else 0
    mlp = read_gated(fields, sizes, merged="gate_up_proj")
    attentions = windowed_layers(fields, sizes, attention, window, [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])
