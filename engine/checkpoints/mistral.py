"""Mistral and Ministral 7B style models: Llama with a sliding window on every layer and no biases."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import MIN_WINDOW, DecoderShape, read_dense

DEFAULT_WINDOW = 4096
DEFAULT_KV_HEADS = 8


def read_shape(fields: Fields) -> DecoderShape:
    """A null sliding_window is full attention; a missing one is the family's default of 4096."""
    window = fields.integer("sliding_window", DEFAULT_WINDOW, minimum=MIN_WINDOW)
    if "sliding_window" in fields.table and not fields.has("sliding_window"):
        window = 0
    return read_dense(fields, num_kv_heads=DEFAULT_KV_HEADS, window=window)
