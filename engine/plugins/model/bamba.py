"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba 2 with attention in some layers; half of each head rotates."""

from engine.checkpoints.mamba import read_mamba
from engine.checkpoints.reading import decoder, read_gated, read_kinds, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"BambaForCausalLM": "bamba"}}

ATTENDING, RECURRENT = ("attention", "full_attention"), ("mamba", "linear_attention")


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attn_layer_indices names the layers with attention if there is no list of kinds."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    sizes = read_sizes(fields, num_kv_heads=8)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads, rotary=read_rotary(fields, sizes, partial=0.5), qkv_bias=bias, output_bias=bias
    )
    mamba = read_mamba(fields, sizes.hidden_size)
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"
    if fields.has(name):
        kinds = read_kinds(fields, sizes.num_layers, (*ATTENDING, *RECURRENT), name)
        attends = [kind in ATTENDING for kind in kinds]
    else:
        attends = [index in fields.integers("attn_layer_indices") for index in range(sizes.num_layers)]
    mlp = read_gated(fields, sizes, bias=fields.flag("mlp_bias", False), name="feed_forward")
    layers = [
        LayerShape(
            attention=attention if one else None,
            recurrent=None if one else mamba,
            mlp=mlp,
            before_attention=read_norm(fields, "input_layernorm"),
            before_mlp=read_norm(fields, "pre_ff_layernorm"),
        )
        for one in attends
    ]
    return decoder(fields, sizes, layers, norm="model.final_layernorm")
