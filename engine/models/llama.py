"""Llama 2, 3, 3.1, 3.2: the plain dense decoder, with optional biases and llama3-scaled rotary frequencies."""

from engine.models.fields import Fields
from engine.models.shape import DecoderShape, read_dense


def read_shape(fields: Fields) -> DecoderShape:
    """attention_bias covers q, k, v and the output projection alike."""
    attention_bias = fields.flag("attention_bias", False)
    return read_dense(
        fields,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
