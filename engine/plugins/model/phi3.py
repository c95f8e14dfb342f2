"""Phi-3, Phi-3.5, Phi-4 (Abdin et al. 2024): Llama with merged projections; a part of each head may stay unrotated."""

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

ORIGINAL, ORIGINAL_LEN = "original_max_position_embeddings", 4096


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  transformers ignores an original length that is given only inside the rotary settings."""
    fields = context.fields
    inner = fields.section("rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters")
    if not fields.has(ORIGINAL) and (length := inner.integer(ORIGINAL, ORIGINAL_LEN)) != ORIGINAL_LEN:
        raise inner.error(ORIGINAL, length, f"it at the top level too, where a missing one means {ORIGINAL_LEN}")
    fields = fields.with_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=ORIGINAL_LEN)
    sizes = read_sizes(fields)
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes, partial=1.0), merged="qkv_proj")
    window = fields.integer("sliding_window", minimum=MIN_WINDOW) if fields.has("sliding_window") else 0
    mlp = read_gated(fields, sizes, merged="gate_up_proj")
    attentions = windowed_layers(fields, sizes, attention, window, [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])
