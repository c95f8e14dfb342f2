"""Llama 2, 3, 3.1, 3.2: the plain dense decoder, with optional biases and llama3-scaled rotary frequencies."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape, read_dense


def read_shape(fields: Fields) -> DecoderShape:
    """attention_bias covers q, k, v and the output projection alike."""
    max_len = fields.integer("max_position_embeddings")
    for name in ("sliding_window", "attention_chunk_size"):
        # transformers 5 masks nothing by it, but lets its cache forget: what it computes depends on how it is asked.
        if (window := fields.integer(name, max_len)) < max_len:
            raise fields.error(name, window, "null: every layer of a Llama sees the whole context")
    attention_bias = fields.flag("attention_bias", False)
    return read_dense(
        fields,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
