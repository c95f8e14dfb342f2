"""Qwen3-Next and Qwen3.5 (Alibaba 2025): the gated delta rule in most layers, gated attention in the others."""

from msgspec.structs import replace

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_TAPS,
    MAX_WIDTH,
    Sizes,
    decoder,
    read_activation,
    read_gated,
    read_kinds,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import (
    DecoderShape,
    ExpertsShape,
    GatedAttentionShape,
    GatedDeltaShape,
    HeadNormShape,
    LayerShape,
    Layout,
    PartShape,
    PredictorShape,
    RouterShape,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {
    "api": 1,
    "architectures": {
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_5_text",
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    },
}

DELTA, ATTENTION = "linear_attention", "full_attention"
DENSE = "qwen3_5_text"


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A quarter of each head rotates.  ``proposer.mtp`` reads the layer of ``mtp``."""
    fields = context.fields
    kind = fields.text("model_type", "qwen3_next")
    if kind.endswith("_moe_text"):
        fields = fields.with_defaults(intermediate_size=1)  # every MLP is a mixture of experts
    sizes = read_sizes(fields, head_size=256)
    bias, eps = fields.flag("attention_bias", False), read_norm(fields, "").eps
    attention = GatedAttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes, partial=0.25),
        head_norm=HeadNormShape(eps=eps, offset=1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    halved = fields.flag("gates_apart", False)  # in a GGUF file
    delta = read_delta(fields, eps, ("halved" if halved else "grouped") if kind == "qwen3_next" else "joined")
    plain = LayerShape(
        attention=None,
        mlp=None,
        before_attention=read_norm(fields, "input_layernorm", offset=1.0),
        before_mlp=read_norm(fields, "post_attention_layernorm", offset=1.0),
    )
    mlps = _mlps(fields, sizes, kind)
    layers = [
        replace(plain, mlp=mlp, **({"attention": attention} if layer == ATTENTION else {"recurrent": delta}))
        for layer, mlp in zip(_kinds(fields, sizes.num_layers), mlps, strict=True)
    ]
    predictor = _predictor(
        fields,
        replace(plain, attention=attention, mlp=read_gated(fields, sizes) if kind == DENSE else _experts(fields, kind)),
    )
    shape = decoder(fields, sizes, layers, offset=1.0, unread=(predictor.pattern,))
    return replace(shape, predictor=predictor)


def _predictor(fields: Fields, layer: LayerShape) -> PredictorShape:
    return PredictorShape(
        stem="mtp",
        prefix="mtp.layers.0",
        layer=layer,
        embedding_norm=read_norm(fields, "mtp.pre_fc_norm_embedding", offset=1.0),
        state_norm=read_norm(fields, "mtp.pre_fc_norm_hidden", offset=1.0),
        fuse="mtp.fc",
        norm=read_norm(fields, "mtp.norm", offset=1.0),
    )


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    if fields.has("layer_types"):
        return read_kinds(fields, num_layers, (DELTA, ATTENTION))
    interval = fields.integer("full_attention_interval", 4)
    return [DELTA if (index + 1) % interval else ATTENTION for index in range(num_layers)]


def read_delta(fields: Fields, eps: float, layout: Layout, most: float = 1.0) -> GatedDeltaShape:
    """Return the gated delta rule of the fields that begin with linear_.  The others are as in ``GatedDeltaShape``."""
    read_activation(fields)
    num_keys = fields.integer("linear_num_key_heads", 16, maximum=MAX_HEADS)
    num_heads = fields.integer("linear_num_value_heads", 32, maximum=MAX_HEADS)
    if num_heads % num_keys:
        raise fields.error("linear_num_value_heads", num_heads, f"a multiple of linear_num_key_heads={num_keys}")
    size = fields.integer("linear_inner_size", 128 * num_heads) // num_heads  # a GGUF file has that of all heads
    return GatedDeltaShape(
        num_heads=num_heads,
        num_keys=num_keys,
        key_size=fields.integer("linear_key_head_dim", 128, maximum=MAX_WIDTH),
        value_size=fields.integer("linear_value_head_dim", size, maximum=MAX_WIDTH),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_TAPS),
        eps=eps,
        most=most,
        layout=layout,
    )


def _mlps(fields: Fields, sizes: Sizes, kind: str) -> list[PartShape]:
    """Return the MLP of each layer: experts, but in a dense model and in layers that are said to have none."""
    if kind == DENSE:
        return [read_gated(fields, sizes)] * sizes.num_layers
    experts = _experts(fields, kind)
    step, without = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    dense = read_gated(fields, sizes)
    return [experts if one not in without and (one + 1) % step == 0 else dense for one in range(sizes.num_layers)]


def _experts(fields: Fields, kind: str) -> ExpertsShape:
    # Qwen3.5 is published with its experts in stacks, but not if they are rounded.
    in_stacks = kind != "qwen3_next" and not fields.has("quantization_config")
    num_experts = fields.integer("num_experts", 512, maximum=MAX_EXPERTS)
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 10 if kind == "qwen3_next" else 8, maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size", 512, maximum=MAX_WIDTH),
        activation=read_activation(fields),
        router=RouterShape(normalised=fields.flag("norm_topk_prob", True)),
        shared_size=fields.integer("shared_expert_intermediate_size", 512, maximum=MAX_WIDTH),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
        stacked=in_stacks,
        halved=in_stacks,
        upright=in_stacks,
    )
