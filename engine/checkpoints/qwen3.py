"""Qwen3 dense: query and key heads are normalised before rotation, and a head's size is its own setting."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape, read_dense, read_sliding_window

DEFAULT_HEAD_SIZE = 128


def read_shape(fields: Fields) -> DecoderShape:
    """attention_bias covers q, k, v and the output projection alike."""
    window, first_window_layer = read_sliding_window(fields)
    attention_bias = fields.flag("attention_bias", False)
    return read_dense(
        fields,
        head_size=DEFAULT_HEAD_SIZE,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        window=window,
        first_window_layer=first_window_layer,
    )
