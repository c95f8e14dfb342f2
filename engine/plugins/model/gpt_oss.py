"""The gpt-oss models (OpenAI 2025): attention sinks, alternating windows, biases, experts with a clamped activation."""

from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MIN_WINDOW,
    decoder,
    pre_norm,
    read_layer_types,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, ExpertsShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"GptOssForCausalLM": "gpt_oss"}}

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  Even layers have the window, unless layer_types sets others.

    A GGUF file has the experts one by one."""
    fields = context.fields.with_defaults(rms_norm_eps=1e-5, rope_parameters=YARN)
    sizes = read_sizes(fields, head_size=64, num_kv_heads=8)
    bias = fields.flag("attention_bias", True)
    attention = AttentionShape(
        **sizes.heads, rotary=read_rotary(fields, sizes, theta=150_000.0), sinks=True, qkv_bias=bias, output_bias=bias
    )
    num_experts = fields.integer("num_local_experts", 128, maximum=MAX_EXPERTS)
    experts = ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", 4, maximum=num_experts),
        expert_size=sizes.intermediate_size,
        activation="clamped_swish",
        router=RouterShape(name="router", bias=True),
        stacked=fields.flag("experts_in_stacks", True),
        limit=fields.number("swiglu_limit", 7.0),
        slope=fields.number("swiglu_alpha", 1.702),
    )
    window = 0 if fields.is_null("sliding_window") else fields.integer("sliding_window", 128, minimum=MIN_WINDOW)
    windowed = read_layer_types(fields, sizes, [layer % 2 == 0 for layer in range(sizes.num_layers)])
    attentions = windowed_layers(fields, sizes, attention, window, windowed)
    return decoder(fields, sizes, [pre_norm(fields, one, experts) for one in attentions])
