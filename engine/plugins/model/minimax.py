"""MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025): lightning attention in most layers, softmax attention in the others.

Each layer has experts, and adds to the norm of what it is given, in place of that itself."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_HEADS,
    Sizes,
    decoder,
    read_activation,
    read_kinds,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    LayerShape,
    LightningShape,
    RenewingShape,
    RouterShape,
    Scaling,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {
    "api": 1,
    "architectures": {
        "MiniMaxForCausalLM": "minimax",
        "MiniMaxText01ForCausalLM": "minimax_text_01",
        "MiniMaxM1ForCausalLM": "minimax_m1",
    },
}

LIGHTNING, ATTENTION = "linear_attention", "full_attention"
NORM_EPS = 1e-6  # of the norm behind lightning attention, independent of rms_norm_eps, as in transformers
TABLES = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  The first files have words of their own for kinds of layers and factors."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    fields.demand("postnorm", True, "a layer adds to the norm of its input")
    if fields.integer("shared_intermediate_size", 0, minimum=0):
        raise fields.error(
            "shared_intermediate_size", fields.integer("shared_intermediate_size"), "0: no shared expert"
        )
    sizes = read_sizes(fields, num_kv_heads=8)
    layers = [_layer(fields, sizes, kind, index) for index, kind in enumerate(_kinds(fields, sizes.num_layers))]
    return decoder(fields, sizes, layers, unread=(TABLES,))


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    if fields.has("layer_types"):
        return read_kinds(fields, num_layers, (LIGHTNING, ATTENTION))
    if not fields.has("attn_type_list"):
        return [LIGHTNING if index % 2 else ATTENTION for index in range(num_layers)]
    kinds = fields.integers("attn_type_list")
    if len(kinds) != num_layers or max(kinds) > 1:
        raise fields.error("attn_type_list", list(kinds), f"a list of {num_layers} numbers, each 0 or 1")
    return [ATTENTION if kind else LIGHTNING for kind in kinds]


def _layer(fields: Fields, sizes: Sizes, kind: str, index: int) -> LayerShape:
    short, long = ("full_attn", "full_attention") if kind == ATTENTION else ("linear_attn", "linear_attention")
    alpha, beta = _factors(fields, short, long)
    mlp_alpha, mlp_beta = _factors(fields, "mlp", "mlp")
    return LayerShape(
        attention=_attention(fields, sizes) if kind == ATTENTION else None,
        recurrent=None if kind == ATTENTION else _lightning(sizes, index),
        mlp=_experts(fields, sizes),
        before_attention=RenewingShape(norm=read_norm(fields, "input_layernorm"), factor=alpha),
        behind_attention=Scaling(factor=beta),
        before_mlp=RenewingShape(norm=read_norm(fields, "post_attention_layernorm"), factor=mlp_alpha),
        behind_mlp=Scaling(factor=mlp_beta),
    )


def _factors(fields: Fields, short: str, long: str) -> tuple[float, float]:
    """Return the factors of the norm and of what is added to it."""
    alpha, beta = (
        fields.number(f"{short}_{name}_factor", fields.number(f"layernorm_{long}_{name}", 1.0))
        for name in ("alpha", "beta")
    )
    return alpha, beta


def _attention(fields: Fields, sizes: Sizes) -> AttentionShape:
    """Return the attention.  rotary_dim is the number of a head's elements that rotate; a missing one means all."""
    partial = fields.integer("rotary_dim", sizes.head_size, maximum=MAX_HEADS) / sizes.head_size
    if fields.has("sliding_window"):
        raise fields.error("sliding_window", fields.integer("sliding_window"), "null: released models have no window")
    return AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes, theta=1_000_000.0, partial=partial))


def _lightning(sizes: Sizes, index: int) -> LightningShape:
    """Return lightning attention, which forgets less from head to head, and from layer to layer."""
    share = 1 - index / (sizes.num_layers - 1 + 1e-5) + 1e-5
    return LightningShape(
        num_heads=sizes.num_heads,
        head_size=sizes.head_size,
        rates=tuple(share * 2 ** (-8 * (head + 1) / sizes.num_heads) for head in range(sizes.num_heads)),
        eps=NORM_EPS,
    )


def _experts(fields: Fields, sizes: Sizes) -> ExpertsShape:
    num_experts = fields.integer("num_local_experts", 8, maximum=MAX_EXPERTS)
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 2, maximum=num_experts),
        expert_size=sizes.intermediate_size,
        activation=read_activation(fields),
        router=RouterShape(),
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
