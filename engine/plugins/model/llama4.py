"""Llama 4 (Meta 2025): chunked attention, full layers without positions, experts next to one that every token uses.

Queries of the layers without positions grow with the logarithm of their position; the weight of an expert multiplies
what enters it."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.query_shapes import TemperatureShape, TemperedAttentionShape
from engine.checkpoints.reading import (
    FULL,
    MAX_EXPERTS,
    MAX_WIDTH,
    MIN_WINDOW,
    Sizes,
    decoder,
    pre_norm,
    read_activation,
    read_norm,
    read_rotary,
    read_sizes,
)
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    GatedShape,
    HeadLengthShape,
    PartShape,
    RouterShape,
)
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.smollm3 import read_rotated

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Llama4ForCausalLM": "llama4_text"}}

CHUNKED = "chunked_attention"


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  The layers with positions are those with chunks."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5)
    if fields.table.get("no_rope_layers") == []:  # in the first files; it means the default
        fields = Fields({**fields.table, "no_rope_layers": None}, fields.origin)
    sizes = read_sizes(fields, head_size=128, num_kv_heads=8)
    rotated = read_rotated(fields, sizes)
    local, full = _attentions(fields, sizes)
    kinds = [CHUNKED if one else FULL for one in rotated]
    if (seen := fields.table.get("layer_types")) not in (None, kinds):
        raise fields.error("layer_types", seen, f"{CHUNKED} for the layers with positions, {FULL} for the others")
    mlps = _mlps(fields, sizes)
    layers = [pre_norm(fields, local if one else full, mlp) for one, mlp in zip(rotated, mlps, strict=True)]
    return decoder(fields, sizes, layers)


def _attentions(fields: Fields, sizes: Sizes) -> tuple[AttentionShape, AttentionShape]:
    """Return the attention of layers with positions, and of those without."""
    bias = fields.flag("attention_bias", False)
    rotary = msgspec.structs.replace(read_rotary(fields, sizes, theta=500_000.0), interleaved=True)
    null = fields.is_null("attention_chunk_size")
    chunk = 0 if null else fields.integer("attention_chunk_size", 8192, minimum=MIN_WINDOW)
    window = chunk if chunk < sizes.max_len else 0
    local = AttentionShape(
        **sizes.heads,
        rotary=rotary,
        window=window,
        chunked=window > 0,
        head_norm=HeadLengthShape(eps=read_norm(fields, "").eps) if fields.flag("use_qk_norm", True) else None,
        qkv_bias=bias,
        output_bias=bias,
    )
    full = AttentionShape(**sizes.heads, rotary=None, qkv_bias=bias, output_bias=bias)
    if fields.table.get("attn_temperature_tuning", True):  # the first files have a number here
        temperature = TemperatureShape(
            strength=fields.number("attn_scale", 0.1),
            period=fields.integer("floor_scale", 8192),
            max_len=sizes.max_len,
            offset=1,
        )
        full = TemperedAttentionShape(**msgspec.structs.asdict(full), temperature=temperature)
    return local, full


def _mlps(fields: Fields, sizes: Sizes) -> list[PartShape]:
    """Return the MLP of each layer, or its experts, which a GGUF file has one by one."""
    in_stacks = fields.flag("experts_in_stacks", True)
    activation, name = read_activation(fields), "feed_forward"
    dense = GatedShape(
        intermediate_size=fields.integer("intermediate_size_mlp", 16384, maximum=MAX_WIDTH),
        activation=activation,
        name=name,
    )
    num_experts = fields.integer("num_local_experts", 16, maximum=MAX_EXPERTS)
    experts = ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 1, maximum=num_experts),
        expert_size=sizes.intermediate_size,
        activation=activation,
        router=RouterShape(name="router", scoring="sigmoid", normalised=False),
        shared_size=sizes.intermediate_size,
        name=name,
        stacked=in_stacks,
        halved=in_stacks,
        shared="shared_expert",
        weighs_inputs=True,
    )
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.integers("moe_layers") if fields.has("moe_layers") else range(step - 1, sizes.num_layers, step)
    return [experts if layer in listed else dense for layer in range(sizes.num_layers)]
