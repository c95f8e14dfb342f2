"""SmolLM3 (Hugging Face 2025): Llama with no positions in every fourth layer."""

from typing import Any

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MIN_WINDOW,
    Sizes,
    decoder,
    pre_norm,
    read_gated,
    read_layer_types,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"SmolLM3ForCausalLM": "smollm3"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A window applies to layers without positions, attention_bias to q, k, v and the output."""
    fields = context.fields
    sizes = read_sizes(fields, num_kv_heads=4)
    rotary = read_rotary(fields, sizes, theta=2_000_000.0)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(**sizes.heads, rotary=rotary, qkv_bias=bias, output_bias=bias)
    rotated = read_rotated(fields, sizes)
    window, windowed = 0, [False] * sizes.num_layers
    if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        window = fields.integer("sliding_window", minimum=MIN_WINDOW)
        windowed = read_layer_types(fields, sizes, [not one for one in rotated])
    attentions = [
        one if is_rotated else msgspec.structs.replace(one, rotary=None)
        for one, is_rotated in zip(windowed_layers(fields, sizes, attention, window, windowed), rotated, strict=True)
    ]
    mlp = read_gated(fields, sizes, bias=fields.flag("mlp_bias", False))
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions], tied=True)


def read_rotated(fields: Fields, sizes: Sizes) -> list[bool]:
    """Return for each layer whether it has positions; no_rope_layers has a 1 for these."""
    interval = fields.integer("no_rope_layer_interval", 4)
    listed: Any = fields.table.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % interval != 0 for layer in range(sizes.num_layers)]
    if not isinstance(listed, list) or len(listed) != sizes.num_layers or not all(one in (0, 1) for one in listed):
        raise fields.error("no_rope_layers", listed, f"a list of {sizes.num_layers} numbers, each 0 or 1")
    return [one == 1 for one in listed]
