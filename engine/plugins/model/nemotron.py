"""Nemotron 3 and 4, Minitron (NVIDIA 2024): layer norms around 1, an MLP with squared ReLU, half of each head
rotates."""

import msgspec

from engine.checkpoints.reading import ACTIVATIONS, alike, decoder, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerNormShape, LayerShape, MLPShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"NemotronForCausalLM": "nemotron"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields
    sizes = read_sizes(fields)
    eps, bias = fields.number("norm_eps", 1e-5), fields.flag("attention_bias", False)
    layer = LayerShape(
        before_attention=LayerNormShape(name="input_layernorm", eps=eps, offset=1.0),
        attention=AttentionShape(
            **sizes.heads, rotary=read_rotary(fields, sizes, partial=0.5), qkv_bias=bias, output_bias=bias
        ),
        before_mlp=LayerNormShape(name="post_attention_layernorm", eps=eps, offset=1.0),
        mlp=MLPShape(
            intermediate_size=sizes.intermediate_size,
            activation=fields.choice("hidden_act", "relu2", (*ACTIVATIONS, "relu2")),
            bias=fields.flag("mlp_bias", False),
        ),
    )
    shape = decoder(fields, sizes, alike(fields, sizes, layer))
    return msgspec.structs.replace(shape, norm=LayerNormShape(name="model.norm", eps=eps, offset=1.0))
