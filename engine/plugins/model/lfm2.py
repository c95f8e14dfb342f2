"""LFM2 (Liquid AI 2025): gated short convolutions, with attention in some layers and, in LFM2-MoE, experts."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_TAPS,
    MAX_WIDTH,
    Sizes,
    decoder,
    read_kinds,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    GatedShape,
    HeadNormShape,
    LayerShape,
    RouterShape,
    ShortConvolutionShape,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2_moe"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Older files name attention layers by full_attn_idxs, and an MLP's size block_ff_dim."""
    fields = context.fields
    fields = fields.with_defaults(
        rms_norm_eps=fields.number("norm_eps", 1e-5), tie_word_embeddings=fields.flag("tie_embedding", True)
    )
    if fields.has("block_ff_dim"):
        fields = Fields({**fields.table, "intermediate_size": fields.table["block_ff_dim"]}, fields.origin)
    sizes = read_sizes(fields, num_kv_heads=8)
    norm = HeadNormShape(eps=read_norm(fields, "").eps, query="q_layernorm", key="k_layernorm")
    rotary = read_rotary(fields, sizes, theta=1_000_000.0)
    attention = AttentionShape(**sizes.heads, rotary=rotary, head_norm=norm, output="out_proj")
    convolution = ShortConvolutionShape(
        size=sizes.hidden_size,
        taps=fields.integer("conv_L_cache", 3, minimum=2, maximum=MAX_TAPS),
        bias=fields.flag("conv_bias", False),
    )
    has_experts = fields.text("model_type", "") == "lfm2_moe"
    num_dense = fields.integer("num_dense_layers", 2, minimum=0) if has_experts else sizes.num_layers
    mlp, experts = _mlp(fields, sizes, has_experts), _experts(fields) if has_experts else None
    layers = [
        LayerShape(
            attention=attention if attends else None,
            recurrent=None if attends else convolution,
            mlp=mlp if experts is None or index < num_dense else experts,
            before_attention=read_norm(fields, "operator_norm"),
            before_mlp=read_norm(fields, "ffn_norm"),
        )
        for index, attends in enumerate(_attends(fields, sizes.num_layers))
    ]
    return decoder(fields, sizes, layers, norm="model.embedding_norm")


def _attends(fields: Fields, num_layers: int) -> list[bool]:
    """Return whether each layer has attention."""
    if not fields.has("layer_types"):
        with_attention = fields.integers("full_attn_idxs") or range(num_layers)
        return [index in with_attention for index in range(num_layers)]
    return [kind == "full_attention" for kind in read_kinds(fields, num_layers, ("conv", "full_attention"))]


def _mlp(fields: Fields, sizes: Sizes, has_experts: bool) -> GatedShape:
    """Return the MLP, whose size follows from a wider one unless there are experts."""
    size = sizes.intermediate_size
    if not has_experts and fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.integer("block_multiple_of", 256, maximum=MAX_WIDTH)
        size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return GatedShape(intermediate_size=size, activation="silu", name="feed_forward", gate="w1", up="w3", down="w2")


def _experts(fields: Fields) -> ExpertsShape:
    num_experts = fields.integer("num_experts", 32, maximum=MAX_EXPERTS)
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 4, maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size", 1792, maximum=MAX_WIDTH),
        activation="silu",
        router=RouterShape(
            scoring="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            corrected=fields.flag("use_expert_bias", True),
            correction="expert_bias",
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        name="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
    )
