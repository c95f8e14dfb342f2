"""DeepSeek-V3, R1 and Kimi K2 (DeepSeek-AI 2024): DeepSeek-V2 with experts chosen by bias-corrected sigmoids.

Released files have a layer for multi-token prediction after the last layer, which ``proposer.mtp`` reads."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import pre_norm, read_norm
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    LatentAttentionShape,
    PredictorShape,
    RouterShape,
)
from engine.plugins.hookspecs import ModelContext, hookimpl
from engine.plugins.model.deepseek_v2 import (
    grouped,
    read_experts,
    read_latent_attention,
    read_latent_sizes,
    with_first_dense,
)

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"DeepseekV3ForCausalLM": "deepseek_v3 | kimi_k2"}}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  The weights of experts are scaled to a sum of 1, unless config.json disables that."""
    fields = context.fields
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (found := fields.text(name, only)) != only:
            raise fields.error(name, found, f"{only}: it is how this family chooses experts")
    router = RouterShape(
        scoring="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        corrected=True,
        scale=fields.number("routed_scaling_factor", 2.5),
        exact=True,
    )
    router = grouped(fields, router, fields.integer("n_group", 8), fields.integer("topk_group", 4))
    sizes = read_latent_sizes(fields)
    attention = read_latent_attention(fields, sizes, query_rank=1536, interleaved=fields.flag("rope_interleave", True))
    experts = read_experts(fields, router, number=256, shared=1, size=2048, chosen=8)
    shape = with_first_dense(fields, sizes, attention, experts, first_experts=3)
    return with_predictor(fields, shape, attention, experts)


def with_predictor(
    fields: Fields, shape: DecoderShape, attention: AttentionShape | LatentAttentionShape, experts: ExpertsShape
) -> DecoderShape:
    """Return the decoder with the layer behind its last one, which predicts one token more."""
    stem = f"model.layers.{shape.num_layers}"
    predictor = PredictorShape(
        stem=stem,
        prefix=stem,
        layer=pre_norm(fields, attention, experts),
        embedding_norm=read_norm(fields, f"{stem}.enorm"),
        state_norm=read_norm(fields, f"{stem}.hnorm"),
        fuse=f"{stem}.eh_proj",
        norm=read_norm(fields, f"{stem}.shared_head.norm"),
    )
    return msgspec.structs.replace(shape, predictor=predictor, unread=(predictor.pattern,))
