"""Gemma 4, text only (Gemma Team 2026): layers with a window and full ones differ in their heads, the last layers read
the keys and values of earlier ones, and each layer may have inputs of its own, or experts beside its MLP.

Values are normed without weights, scores are not scaled, and norms multiply by their weight itself."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.layered_shape import (
    BesideExpertsShape,
    BorrowingShape,
    InputGateShape,
    LayeredLayerShape,
    LayeredShape,
    LayerInputsShape,
    NormedValuesShape,
)
from engine.checkpoints.reading import (
    MAX_HEADS,
    MAX_VOCAB,
    MAX_WIDTH,
    MIN_WINDOW,
    Sizes,
    decoder,
    read_activation,
    read_layer_types,
    read_norm,
    read_sizes,
    read_stretch,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    GatedShape,
    HeadNormShape,
    RotaryShape,
    RouterShape,
    Unchanged,
)
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Gemma4ForCausalLM": "gemma4_text"}}
FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
HEADS = ("head_dim", "num_key_value_heads")
UNREAD = r"layers\.(%s)\.self_attn\.([kv]_proj|[kv]_norm)\."  # of layers that read the keys of others


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Every sixth layer is full, unless layer_types sets others; the last one always is."""
    given = context.fields
    if given.table.get("use_bidirectional_attention") not in (None, "vision"):
        seen = given.table["use_bidirectional_attention"]
        raise given.error("use_bidirectional_attention", seen, 'null or "vision": text is generated from left to right')
    fields = Fields(given.table | {"use_bidirectional_attention": None}, given.origin)
    sizes = read_sizes(fields, head_size=256, num_kv_heads=4)
    windowed = read_layer_types(fields, sizes, [(layer + 1) % 6 != 0 for layer in range(sizes.num_layers)])
    windowed[-1] = False
    attentions = _attentions(fields, sizes, windowed)
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0, maximum=MAX_WIDTH)
    layers = [_layer(fields, sizes, one, size) for one in attentions]
    shape = decoder(fields, sizes, layers, tied=True)
    borrowing = [str(index) for index, one in enumerate(attentions) if isinstance(one, BorrowingShape)]
    inputs = LayerInputsShape(
        size=size,
        num_layers=sizes.num_layers,
        vocab_size=fields.integer("vocab_size_per_layer_input", 262_144, sizes.vocab_size if size else 1, MAX_VOCAB),
        eps=read_norm(fields, "").eps,
    )
    given_shape = {name: getattr(shape, name) for name in shape.__struct_fields__} | {
        "embedding_scale": math.sqrt(sizes.hidden_size),
        "rounded_scale": True,
        "logit_cap": fields.nullable("final_logit_softcapping", 0.0),
        "unread": (UNREAD % "|".join(borrowing),) if borrowing else (),
    }
    return LayeredShape(**given_shape, inputs=inputs if size else None)


def _attentions(fields: Fields, sizes: Sizes, windowed: Sequence[bool]) -> list[AttentionShape]:
    """Return the attention of each layer."""
    first = sizes.num_layers - fields.integer("num_kv_shared_layers", 0, minimum=0, maximum=sizes.num_layers - 1)
    if {*windowed[:first]} != {*windowed}:
        seen = sizes.num_layers - first
        raise fields.error("num_kv_shared_layers", seen, "a layer of each kind before those that share its keys")
    shared = fields.flag("attention_k_eq_v", False)
    window = fields.integer("sliding_window", 512, minimum=MIN_WINDOW)
    window = 0 if window >= sizes.max_len else window
    bias, eps = fields.flag("attention_bias", False), read_norm(fields, "").eps
    attentions: list[AttentionShape] = []
    for layer, in_window in enumerate(windowed):
        head_size, num_kv_heads = _heads(fields, sizes, layer, in_window, shared)
        common: dict[str, Any] = {
            "num_heads": sizes.num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "rotary": _rotary(fields, sizes, in_window, head_size),
            "scale": 1.0,
            "window": window if in_window else 0,
            "head_norm": HeadNormShape(eps=eps),
            "qkv_bias": bias,
            "output_bias": bias,
        }
        if layer < first:
            attentions.append(NormedValuesShape(**common, eps=eps, shared=shared and not in_window))
        else:
            lender = max(index for index in range(first) if windowed[index] == in_window)
            own, lent = (head_size, num_kv_heads), (attentions[lender].head_size, attentions[lender].num_kv_heads)
            if own != lent:
                raise fields.error("per_layer_config", own, f"layer {layer} to have heads as layer {lender}, {lent}")
            attentions.append(BorrowingShape(**common, lender=lender))
    return attentions


def _heads(fields: Fields, sizes: Sizes, layer: int, in_window: bool, shared: bool) -> tuple[int, int]:
    """Return the size and the number of a layer's key/value heads; full layers may have others.

    transformers 5 writes what differs by the layer's number, and published files by the kind of layer."""
    own = sizes.head_size, sizes.num_kv_heads
    if fields.has("per_layer_config"):
        others = fields.section("per_layer_config").section(str(layer))
        if unknown := sorted(others.table.keys() - {*HEADS}):
            raise others.error(unknown[0], others.table[unknown[0]], f"only {' and '.join(HEADS)} to differ by layer")
        head_size, count = (
            others.integer(name, default, maximum=MAX_HEADS) for name, default in zip(HEADS, own, strict=True)
        )
    elif in_window:
        return own
    else:
        head_size = fields.integer("global_head_dim", 512, maximum=MAX_HEADS)
        count = fields.integer("num_global_key_value_heads", own[1]) if shared else own[1]
    if head_size % 2 or sizes.num_heads % count:
        expected = f"even heads, as many as divide num_attention_heads={sizes.num_heads}"
        raise fields.error("global_head_dim and num_global_key_value_heads", [head_size, count], expected)
    return head_size, count


def _rotary(fields: Fields, sizes: Sizes, in_window: bool, head_size: int) -> RotaryShape:
    """Return the rotary settings of a kind of layer."""
    given = fields.section("rope_parameters").section("sliding_attention" if in_window else "full_attention")
    given = given if given.table or in_window else Fields(FULL, given.origin)
    theta = given.number("rope_theta", 10_000.0)
    if given.text("rope_type", "default") != "proportional":
        return msgspec.structs.replace(read_stretch(fields, given, sizes, theta, head_size), size=head_size)
    turned = int(given.number("partial_rotary_factor", 1.0) * head_size // 2)
    factor = given.number("factor", 1.0)
    return RotaryShape(kind="proportional", theta=theta, size=head_size, factor=factor, turned=turned)


def _layer(fields: Fields, sizes: Sizes, attention: AttentionShape, input_size: int) -> LayeredLayerShape:
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    wide = isinstance(attention, BorrowingShape) and fields.flag("use_double_wide_mlp", False)
    dense = GatedShape(intermediate_size=sizes.intermediate_size * (2 if wide else 1), activation=activation)
    mixed = fields.flag("enable_moe_block", False)
    before = read_norm(fields, "pre_feedforward_layernorm")
    return LayeredLayerShape(
        attention=attention,
        mlp=_experts(fields, dense) if mixed else dense,
        before_attention=read_norm(fields, "input_layernorm"),
        behind_attention=read_norm(fields, "post_attention_layernorm"),
        before_mlp=Unchanged() if mixed else before,
        behind_mlp=read_norm(fields, "post_feedforward_layernorm"),
        input=InputGateShape(size=input_size, activation=activation) if input_size else None,
        behind_input=read_norm(fields, "post_per_layer_input_norm") if input_size else Unchanged(),
    )


def _experts(fields: Fields, dense: GatedShape) -> BesideExpertsShape:
    num_experts = fields.integer("num_experts", maximum=MAX_WIDTH)
    return BesideExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("top_k_experts", maximum=num_experts),
        expert_size=fields.integer("moe_intermediate_size", maximum=MAX_WIDTH),
        activation=dense.activation,
        router=RouterShape(name="router.proj"),
        name="",
        stacked=fields.flag("experts_in_stacks", True),
        halved=True,
        upright=True,
        dense=dense,
        eps=read_norm(fields, "").eps,
        before_dense=read_norm(fields, "pre_feedforward_layernorm"),
        behind_dense=read_norm(fields, "post_feedforward_layernorm_1"),
        before_experts=read_norm(fields, "pre_feedforward_layernorm_2"),
        behind_experts=read_norm(fields, "post_feedforward_layernorm_2"),
    )
