"""Llama 2, 3, 3.1, 3.2 (Touvron et al. 2023): the plain dense decoder.

RMS norms before attention and MLP, rotary positions, grouped queries, a gated MLP with SiLU, and optional biases."""

from engine.checkpoints.reading import alike, decoder, pre_norm, read_gated, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"LlamaForCausalLM": "llama"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields
    sizes = read_sizes(fields)
    for name in ("sliding_window", "attention_chunk_size"):
        # transformers 5 masks nothing by it, but its cache forgets by it: the result depends on how it is called.
        if (window := fields.integer(name, sizes.max_len)) < sizes.max_len:
            raise fields.error(name, window, "null: every layer of a Llama sees the whole context")
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes), qkv_bias=bias, output_bias=bias)
    mlp = read_gated(fields, sizes, bias=fields.flag("mlp_bias", False))
    return decoder(fields, sizes, alike(fields, sizes, pre_norm(fields, attention, mlp)))
