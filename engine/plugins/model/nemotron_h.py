"""Nemotron-H and Nemotron 3 (NVIDIA 2025): each layer is one of Mamba 2, attention, an MLP and a mixture of experts."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.mamba import check_groups
from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_TAPS,
    MAX_WIDTH,
    Sizes,
    decoder,
    read_kinds,
    read_norm,
    read_sizes,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    LayerShape,
    Mamba2Shape,
    MLPShape,
    Names,
    RouterShape,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"NemotronHForCausalLM": "nemotron_h"}}

SIGNS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Attention has no positions.  Layers that predict several tokens are not read."""
    fields = context.fields
    kinds = _kinds(fields)
    fields = fields.with_defaults(
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5), num_hidden_layers=len(kinds), intermediate_size=1
    )
    sizes = read_sizes(fields, head_size=128, num_kv_heads=8)
    if not fields.is_null("sliding_window") and fields.has("sliding_window"):
        raise fields.error("sliding_window", fields.table["sliding_window"], "null: attention sees everything")
    norm = read_norm(fields, "norm")
    layers = {
        "linear_attention": LayerShape(attention=None, mlp=None, recurrent=_mamba(fields), before_attention=norm),
        "full_attention": LayerShape(
            attention=AttentionShape(**sizes.heads, rotary=None, name="mixer"), mlp=None, before_attention=norm
        ),
        "mlp": LayerShape(attention=None, mlp=_mlp(fields, sizes), before_mlp=norm),
    }
    if "moe" in kinds:
        layers["moe"] = LayerShape(attention=None, mlp=_experts(fields), before_mlp=norm)
    names = Names(embedding="backbone.embeddings", layers="backbone.layers", modules=(("backbone.", "model."),))
    return decoder(fields, sizes, [layers[kind] for kind in kinds], norm="backbone.norm_f", names=names)


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer, which older files name by signs."""
    if fields.has("hybrid_override_pattern") and not fields.has("layers_block_type"):
        pattern = fields.text("hybrid_override_pattern")
        if any(sign not in SIGNS for sign in pattern):
            raise fields.error("hybrid_override_pattern", pattern, f"signs among {' '.join(SIGNS)}")
        return [SIGNS[sign] for sign in pattern]
    name = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    listed = fields.table.get(name)
    num_layers = len(listed) if isinstance(listed, list) else fields.integer("num_hidden_layers")
    kinds = read_kinds(fields, num_layers, (*SIGNS.values(), *OLD_KINDS), name)
    return [OLD_KINDS.get(kind, kind) for kind in kinds]


def _mamba(fields: Fields) -> Mamba2Shape:
    fields.choice("mamba_hidden_act", "silu", ("silu",))
    heads = fields.integer("mamba_num_heads", 128, maximum=MAX_HEADS)
    head_size = fields.integer("mamba_inner_size", 64 * heads) // heads  # a GGUF file has that of all heads
    groups = fields.integer("n_groups", 8, maximum=MAX_HEADS)
    check_groups(fields, "n_groups", groups, heads)
    bias = fields.flag("use_bias", False)
    return Mamba2Shape(
        num_heads=heads,
        num_groups=groups,
        head_size=fields.integer("mamba_head_dim", head_size, maximum=MAX_WIDTH),
        state_size=fields.integer("ssm_state_size", 128, maximum=MAX_WIDTH),
        taps=fields.integer("conv_kernel", 4, minimum=2, maximum=MAX_TAPS),
        eps=read_norm(fields, "").eps,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=bias,
        output_bias=bias,
        least_step=fields.number("time_step_min", 0.001),
        name="mixer",
    )


def _mlp(fields: Fields, sizes: Sizes) -> MLPShape:
    return MLPShape(
        intermediate_size=sizes.intermediate_size,
        activation=fields.choice("mlp_hidden_act", "relu2", ACTIVATIONS),
        bias=fields.flag("mlp_bias", False),
        name="mixer",
    )


def _experts(fields: Fields) -> ExpertsShape:
    if fields.has("moe_latent_size"):
        raise fields.error("moe_latent_size", fields.table["moe_latent_size"], "null: experts are as wide as the model")
    fields.demand("mlp_bias", False, "experts have no biases")
    name = "n_routed_experts" if fields.has("n_routed_experts") else "num_local_experts"
    num_experts = fields.integer(name, 8, maximum=MAX_EXPERTS)
    groups = fields.integer("n_group", 1, maximum=num_experts)
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size", 7688, maximum=MAX_WIDTH),
        activation=fields.choice("mlp_hidden_act", "relu2", ACTIVATIONS),
        router=RouterShape(
            scoring="sigmoid",
            normalised=fields.flag("norm_topk_prob", True),
            corrected=True,
            num_groups=groups,
            num_chosen_groups=fields.integer("topk_group", 1, maximum=groups),
            scale=fields.number("routed_scaling_factor", 1.0),
            exact=True,
        ),
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688, maximum=MAX_WIDTH),
        name="mixer",
        gate="",
    )
