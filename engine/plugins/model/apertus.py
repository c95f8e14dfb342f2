"""Apertus (Swiss AI 2025): normalised heads, and an MLP without a gate whose activation xIELU is learned."""

import msgspec

from engine.checkpoints.reading import alike, decoder, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, HeadNormShape, LayerShape
from engine.checkpoints.xielu import XIELUShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"ApertusForCausalLM": "apertus"}}

# Numbers of the activation, one for each layer, which a GGUF file has among its settings.
NUMBERS = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta", "xielu_eps")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  attention_bias applies to q, k, v and the output projection."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    if not any(fields.has(name) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        fields = fields.with_defaults(rope_parameters=LLAMA3)
    fields.choice("hidden_act", "xielu", ("xielu",))
    fields.demand("qk_norm", True, "heads are normalised")
    fields.demand("post_norm", False, "norms come before attention and MLP")
    fields.demand("mlp_bias", False, "no released model of this family has biases there")
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    mlp = XIELUShape(intermediate_size=sizes.intermediate_size)
    layer = LayerShape(
        before_attention=read_norm(fields, "attention_layernorm"),
        attention=AttentionShape(
            **sizes.heads,
            rotary=read_rotary(fields, sizes, theta=12_000_000.0),
            head_norm=HeadNormShape(eps=read_norm(fields, "").eps),
            qkv_bias=bias,
            output_bias=bias,
        ),
        before_mlp=read_norm(fields, "feedforward_layernorm"),
        mlp=mlp,
    )
    layers = alike(fields, sizes, layer)
    if tables := [fields.table[name] for name in NUMBERS if isinstance(fields.table.get(name), list)]:
        if len(tables) < len(NUMBERS) or any(len(table) != len(layers) for table in tables):
            sizes_seen = ", ".join(str(len(table)) for table in tables)
            expected = f"{len(NUMBERS)} lists of {len(layers)} numbers: {', '.join(NUMBERS)}"
            raise fields.error(NUMBERS[0], f"among lists of {sizes_seen} numbers", expected)
        mlps = [msgspec.structs.replace(mlp, numbers=one) for one in zip(*tables, strict=True)]
        layers = [msgspec.structs.replace(layer, mlp=mlp) for mlp in mlps]
    return decoder(fields, sizes, layers)
