"""Kimi-Linear (Moonshot AI 2025): Kimi delta attention in most layers, DeepSeek's latent attention in the others.

No layer has positions.  The first layers have an MLP, the others experts as in DeepSeek-V3."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MAX_HEADS,
    MAX_TAPS,
    MAX_WIDTH,
    Sizes,
    decoder,
    pre_norm,
    read_activation,
    read_gated,
    read_kinds,
    read_norm,
)
from engine.checkpoints.shape import DecoderShape, ExpertsShape, GatedShape, KimiDeltaShape, Names, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.deepseek_v2 import grouped, read_experts, read_latent_attention, read_latent_sizes
from engine.plugins.model.qwen3_next import ATTENTION, DELTA

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"KimiLinearForCausalLM": "kimi_linear"}}

# What config.json calls fields of DeepSeek-V3.
WORDS = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Published files number the layers of each kind from 1."""
    fields = _in_words_of_deepseek(context.fields)
    fields.demand("mla_use_nope", True, "transformers computes this family without positions")
    sizes = read_latent_sizes(fields)
    attention = msgspec.structs.replace(
        read_latent_attention(fields, sizes, query_rank=0, interleaved=False), rotary=None
    )
    delta, dense, experts = _delta(fields, sizes), read_gated(fields, sizes), _experts(fields)
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    kinds = ["dense" if index < first else "sparse" for index in range(sizes.num_layers)]
    if fields.has("mlp_layer_types"):
        kinds = read_kinds(fields, sizes.num_layers, ("dense", "sparse"), "mlp_layer_types")
    layers = [
        pre_norm(
            fields,
            attention if kind == ATTENTION else None,
            dense if mlp == "dense" else experts,
            delta if kind == DELTA else None,
        )
        for kind, mlp in zip(_kinds(fields, sizes), kinds, strict=True)
    ]
    names = Names(modules=(("self_attn.f_", "self_attn.forget_gate.f_"),))
    return decoder(fields, sizes, layers, names=names)


def _in_words_of_deepseek(fields: Fields) -> Fields:
    renamed = {own: fields.table[theirs] for own, theirs in WORDS.items() if theirs in fields.table}
    missing = {"q_lora_rank": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 20}
    return Fields(missing | fields.table | renamed, fields.origin)


def _kinds(fields: Fields, sizes: Sizes) -> list[str]:
    if fields.has("layer_types"):
        return read_kinds(fields, sizes.num_layers, (DELTA, ATTENTION))
    section, numbers = fields.section("linear_attn_config"), range(1, sizes.num_layers + 1)
    if not section.has("full_attn_layers"):
        return [ATTENTION if number > 1 and number % 4 == 1 else DELTA for number in numbers]
    full, linear = section.integers("full_attn_layers"), section.integers("kda_layers")
    if sorted(full + linear) != [*numbers]:
        raise section.error("kda_layers", list(linear), f"the layers of 1 to {sizes.num_layers} but {list(full)}")
    return [ATTENTION if number in full else DELTA for number in numbers]


def _delta(fields: Fields, sizes: Sizes) -> KimiDeltaShape:
    """Return Kimi delta attention.  A head's size is also what gates and decays pass through."""
    read_activation(fields)
    section = fields.section("linear_attn_config")
    size = section.integer("head_dim", fields.integer("linear_head_dim", 128), maximum=MAX_WIDTH)
    flat = fields.flag("flat_decays", False)  # in a GGUF file, which has as many heads here as in attention
    number = fields.integer("linear_num_heads", sizes.num_heads if flat else 32)
    heads = section.integer("num_heads", number, maximum=MAX_HEADS)
    taps = fields.integer("linear_conv_kernel_dim", 4)
    return KimiDeltaShape(
        num_heads=heads,
        num_keys=heads,
        key_size=size,
        value_size=size,
        rank=size,
        flat=flat,
        taps=section.integer("short_conv_kernel_size", taps, minimum=2, maximum=MAX_TAPS),
        eps=read_norm(fields, "").eps,
        layout="apart",
        name="self_attn",
    )


def _experts(fields: Fields) -> ExpertsShape:
    fields.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", fields.integer("moe_layer_freq"), "1: every later layer has experts")
    router = RouterShape(
        scoring="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        corrected=True,
        scale=fields.number("routed_scaling_factor", 2.446),
        exact=True,
    )
    router = grouped(fields, router, fields.integer("n_group", 1), fields.integer("topk_group", 1))
    experts = read_experts(fields, router, number=256, shared=1, size=1024, chosen=8)
    name = "block_sparse_moe"
    shared = GatedShape(
        intermediate_size=experts.shared_size, activation=experts.activation, name=f"{name}.{experts.shared}"
    )
    return msgspec.structs.replace(experts, shared_size=0, beside=shared, name=name, gate="w1", up="w3", down="w2")
