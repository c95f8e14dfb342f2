"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window on the upper layers."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape, read_dense, read_sliding_window


def read_shape(fields: Fields) -> DecoderShape:
    """The biases are not configurable: every checkpoint of the family has them."""
    window, first_window_layer = read_sliding_window(fields)
    return read_dense(fields, qkv_bias=True, window=window, first_window_layer=first_window_layer)
