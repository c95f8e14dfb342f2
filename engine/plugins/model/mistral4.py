"""Mistral 4 (Mistral AI 2026): DeepSeek's latent attention, with queries that grow with their position, and experts."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.query_shapes import TemperedLatentShape
from engine.checkpoints.shape import DecoderShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.deepseek_v2 import (
    read_experts,
    read_latent_attention,
    read_latent_sizes,
    with_first_dense,
)
from engine.plugins.model.ministral3 import read_temperature

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Mistral4ForCausalLM": "mistral4"}}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  All experts of a layer are one tensor; the rotated part of a head is its qk_rope_head_dim."""
    fields = context.fields.with_defaults(rope_parameters=YARN, kv_lora_rank=256, qk_nope_head_dim=64)
    for name in ("rope_parameters", "rope_scaling"):
        settings = {key: one for key, one in fields.section(name).table.items() if key != "partial_rotary_factor"}
        fields = Fields({**fields.table, name: settings}, fields.origin)
    for name in ("n_group", "topk_group"):
        if (groups := fields.integer(name, 1)) != 1:
            raise fields.error(name, groups, "1: experts in groups are not served for this family")
    router = RouterShape(
        normalised=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.0)
    )
    sizes = read_latent_sizes(fields)
    plain = read_latent_attention(fields, sizes, query_rank=1024, interleaved=fields.flag("rope_interleave", True))
    attention = TemperedLatentShape(**msgspec.structs.asdict(plain), temperature=read_temperature(fields, sizes))
    experts = msgspec.structs.replace(
        read_experts(fields, router, number=128, shared=1, size=2048, chosen=4),
        stacked=fields.flag("experts_in_stacks", True),
        halved=True,
        upright=True,
    )
    return with_first_dense(fields, sizes, attention, experts, first_experts=0)
