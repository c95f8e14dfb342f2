"""Ministral 3 (Mistral AI 2025): Mistral whose queries grow with the logarithm of their position."""

from engine.checkpoints.fields import Fields
from engine.checkpoints.query_shapes import TemperatureShape, TemperedAttentionShape
from engine.checkpoints.reading import (
    MIN_WINDOW,
    Sizes,
    decoder,
    pre_norm,
    read_gated,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import DecoderShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"Ministral3ForCausalLM": "ministral3"}}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  A missing sliding_window is full attention."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5, rope_parameters=YARN)
    sizes = read_sizes(fields, head_size=128, num_kv_heads=8)
    window = fields.integer("sliding_window", minimum=MIN_WINDOW) if fields.has("sliding_window") else 0
    temperature = read_temperature(fields, sizes)
    attention = TemperedAttentionShape(
        **sizes.heads, rotary=read_rotary(fields, sizes, theta=1_000_000.0), temperature=temperature
    )
    mlp = read_gated(fields, sizes)
    attentions = windowed_layers(fields, sizes, attention, window, [True] * sizes.num_layers)
    return decoder(fields, sizes, [pre_norm(fields, one, mlp) for one in attentions])


def read_temperature(fields: Fields, sizes: Sizes) -> TemperatureShape:
    """Return the temperature of queries, which is among the rotary settings."""
    scaling = fields.section("rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters")
    return TemperatureShape(
        strength=scaling.number("llama_4_scaling_beta"),
        period=scaling.integer("original_max_position_embeddings"),
        max_len=sizes.max_len,
    )
