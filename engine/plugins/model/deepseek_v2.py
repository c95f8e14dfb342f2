"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts next to a shared one that every token uses.

Experts are in groups, and a token uses experts of the best groups only; the first layers have an MLP."""

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_WIDTH,
    Sizes,
    alike,
    decoder,
    pre_norm,
    read_activation,
    read_gated,
    read_rotary,
    read_sizes,
    yarn_temperature,
)
from engine.checkpoints.shape import AttentionShape, DecoderShape, ExpertsShape, LatentAttentionShape, RouterShape
from engine.plugins.hookspecs import ModelContext, hookimpl

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"DeepseekV2ForCausalLM": "deepseek_v2"}}
LATENT_EPS = 1e-6  # of the norms within attention, independent of rms_norm_eps, as in transformers
METHODS = ("greedy", "group_limited_greedy")


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """Return the shape.  The weights of experts are their softmax over all experts."""
    fields = context.fields
    fields.demand("mlp_bias", False, "no released model of this family has biases there")
    fields.demand("norm_topk_prob", False, "transformers does not scale the weights of this family")
    method = fields.choice("topk_method", "greedy", METHODS)
    router = RouterShape(normalised=False, exact=True, scale=fields.number("routed_scaling_factor", 1.0))
    if method == "group_limited_greedy":
        router = grouped(fields, router, fields.integer("n_group"), fields.integer("topk_group"))
    sizes = read_latent_sizes(fields)
    attention = read_latent_attention(fields, sizes, query_rank=1536, interleaved=True)
    experts = read_experts(fields, router, number=64, shared=2, size=1407)
    return with_first_dense(fields, sizes, attention, experts, first_experts=0)


def read_latent_sizes(fields: Fields) -> Sizes:
    """Return the sizes with the rotary part as head size, since the rotary settings apply to it."""
    rotary_size = fields.integer("qk_rope_head_dim", 64, maximum=MAX_HEADS)
    sizes = msgspec.structs.replace(read_sizes(fields, head_size=rotary_size), head_size=rotary_size)
    if rotary_size % 2:
        raise fields.error("qk_rope_head_dim", rotary_size, "an even number, so that rotary embeddings can pair it")
    if sizes.num_kv_heads != sizes.num_heads:
        expected = f"num_attention_heads={sizes.num_heads}: every head is made from the latents"
        raise fields.error("num_key_value_heads", sizes.num_kv_heads, expected)
    return sizes


def read_latent_attention(fields: Fields, sizes: Sizes, *, query_rank: int, interleaved: bool) -> LatentAttentionShape:
    """Return the attention's shape.  query_rank: the default if config.json does not set it; a null means none."""
    both = fields.integer("qk_head_dim", 128 + sizes.head_size, minimum=sizes.head_size + 1, maximum=MAX_HEADS)
    plain_size = fields.integer("qk_nope_head_dim", both - sizes.head_size, maximum=MAX_HEADS)
    rotary = msgspec.structs.replace(read_rotary(fields, sizes), size=sizes.head_size, interleaved=interleaved)
    # Applied twice: once for queries, once for keys.
    scaling = fields.section("rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters")
    weight = scaling.table.get("mscale_all_dim")
    sharper = yarn_temperature(rotary.factor, scaling.number("mscale_all_dim")) if weight else 1.0
    return LatentAttentionShape(
        num_heads=sizes.num_heads,
        latent_size=fields.integer("kv_lora_rank", 512, maximum=MAX_WIDTH),
        rotary_size=sizes.head_size,
        plain_size=plain_size,
        value_size=fields.integer("v_head_dim", 128, maximum=MAX_HEADS),
        rotary=rotary,
        scale=(plain_size + sizes.head_size) ** -0.5 * sharper**2,
        eps=LATENT_EPS,
        query_rank=0 if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank", query_rank, maximum=MAX_WIDTH),
        bias=fields.flag("attention_bias", False),
        split=fields.flag("split_kv_b_proj", False),
    )


def read_experts(
    fields: Fields, router: RouterShape, *, number: int, shared: int, size: int, chosen: int | None = None
) -> ExpertsShape:
    """Return the shape of the experts.

    number, shared, size, chosen: defaults for the number of experts, those that every token uses, their width, and the
    number that a token chooses."""
    num_experts = fields.integer("n_routed_experts", number, maximum=MAX_EXPERTS)
    expert_size = fields.integer("moe_intermediate_size", size, maximum=MAX_WIDTH)
    if num_experts % router.num_groups:
        raise fields.error("n_group", router.num_groups, f"a divisor of n_routed_experts={num_experts}")
    if router.corrected and num_experts == router.num_groups > router.num_chosen_groups:
        expected = f"at most {num_experts // 2}: a group is chosen by its two best of n_routed_experts={num_experts}"
        raise fields.error("n_group", router.num_groups, expected)
    most = num_experts // router.num_groups * router.num_chosen_groups
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", chosen, maximum=most),
        expert_size=expert_size,
        activation=read_activation(fields),
        router=router,
        shared_size=fields.integer("n_shared_experts", shared, maximum=MAX_EXPERTS) * expert_size,
    )


def grouped(fields: Fields, router: RouterShape, num_groups: int, num_chosen: int) -> RouterShape:
    """Return the router for experts in groups."""
    if num_chosen > num_groups:
        raise fields.error("topk_group", num_chosen, f"at most n_group={num_groups}")
    return msgspec.structs.replace(router, num_groups=num_groups, num_chosen_groups=num_chosen)


def with_first_dense(
    fields: Fields,
    sizes: Sizes,
    attention: AttentionShape | LatentAttentionShape,
    experts: ExpertsShape,
    *,
    first_experts: int,
) -> DecoderShape:
    """Return the decoder whose first layers have an MLP.  first_experts: the default for their number."""
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", fields.integer("moe_layer_freq"), "1: every later layer has experts")
    first = fields.integer("first_k_dense_replace", first_experts, minimum=0)
    dense = read_gated(fields, sizes)
    layers = alike(fields, sizes, pre_norm(fields, attention, experts))
    layers[:first] = [pre_norm(fields, attention, dense)] * min(first, len(layers))
    return decoder(fields, sizes, layers)
