"""Families of GGUF files: the names and numbers that llama.cpp's converter writes, and those of Hugging Face.

Owns: the tables.  Does not know: files, tensors.  A further family is an entry of ``FAMILIES``.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

# Key below the architecture's name -> field of config.json.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {"attention.head_count_kv", "attention.key_length"}
EPS, OTHER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SIGMOID = 2  # value of expert_gating_func
WINDOW = {"attention.sliding_window": "sliding_window"}
# Key below the architecture's name -> a setting of YaRN.
YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    # Of a layer that predicts one token further.
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}  # fmt: skip
HEAD_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
SHARED = {f"ffn_{one}_shexp": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")}
HEADS_NORMED = {"use_qk_norm": "self_attn.q_norm.weight"}
# Tensors whose shapes differ: convolutions have no axis for their one input, and numbers of heads or groups have one.
CONVOLUTIONS, FLAT = {"ssm_conv1d.weight", "shortconv.conv.weight"}, {"ssm_a", "ssm_d", "ssm_norm.weight"}
CONVOLUTIONS |= {f"ssm_conv1d_{side}.weight" for side in "qkv"}
ROWS = {"ffn_gate_inp_shexp.weight"}  # matrices of one row
MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
MAMBA_SIZES = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # both of these, in early files
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm", "nextn.shared_head_head": "mtp.shared_head.head",
    "nextn.embed_tokens": "mtp.embed_tokens",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
DELTA_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_inner_size", "full_attention_interval": "full_attention_interval",
}  # fmt: skip
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family's files.  architecture, model_type: of config.json.

    names: tensors besides ``NAMES``, or other names for those, also with '.bias' or '.weight' at the end; '#' stands
    for the number of an expert of a stack, and 'a|b' for two halves of its rows.
    fields: keys besides ``FIELDS``, or other names for those.  settings: what the family's files leave out.
    rotary: the field for its settings.  stretch: what files leave out of them if they have YaRN.
    log_scale: factor of the logarithmic factor of YaRN that gives mscale; 0 for files without.
    partial: whether the number of rotated elements of a head is given.
    bias: the projection whose bias decides attention_bias.
    present: a field of config.json -> the end of a tensor's name whose presence it states.
    kinds: the kinds of layers without attention and with it, if the number of key/value heads of each decides it, or
    a list of those that are recurrent; maybe a third kind, of those with an MLP's size.
    needs: keys whose value must be this one if they are there.
    embedding, layers: what the names of the embedding's tensor and of a layer's tensors begin with.
    predictor: the same of a layer that predicts one token further; '' if it has a number behind the others'.
    paired: whether rows of queries and keys are reordered, so that pairs that rotate are neighbours.
    shifted: whether the weights of norms have 1 added, but of those behind recurrences.
    by_turns: whether heads with a value lie as the first one of each key, then the second one of each, and so on.
    by_width: number of layers of the model whose scores are scaled by hidden size / heads instead of the head size.
    layered: whether layers with a window and without it have heads and rotary settings of their own.
    ends: tokens that end a text, besides those that a file says.
    scaled_head: whether the factor of logits is part of the head's weights, so that a tied head lacks it.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = {}
    fields: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    rotary: str = "rope_parameters"
    stretch: Mapping[str, Any] = {}
    log_scale: float = 0.0
    partial: bool = False
    bias: str = "o_proj"
    present: Mapping[str, str] = {}
    kinds: tuple[str, ...] = ()
    needs: Mapping[str, Any] = {}
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    predictor: str = ""
    paired: bool = False
    shifted: bool = False
    by_turns: bool = False
    by_width: int = 0
    layered: bool = False
    ends: tuple[str, ...] = ()
    scaled_head: bool = False


def _experts(part: str, gate: str, up: str, down: str, router: str = "gate") -> dict[str, str]:
    """Return the names of experts and their router.  part: of a layer, that has them; '' for the layer itself."""
    within = f"{part}." if part else ""
    return {
        "ffn_gate_inp": f"{within}{router}",
        "ffn_gate_exps": f"{within}experts.#.{gate}",
        "ffn_up_exps": f"{within}experts.#.{up}",
        "ffn_gate_up_exps": f"{within}experts.#.{gate}|{up}",
        "ffn_down_exps": f"{within}experts.#.{down}",
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
COUNTS = {"expert_used_count": "num_experts_per_tok"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    **COUNTS,
}
UNSCALED: dict[str, Any] = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}  # without keys that say otherwise
LOCAL = {"expert_count": "num_local_experts", **COUNTS}
GRANITE_FACTORS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def _llama4(**settings: Any) -> GGUFFamily:
    shared = {name: one.replace("mlp.shared_experts", "feed_forward.shared_expert") for name, one in SHARED.items()}
    return GGUFFamily(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        names={
            **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
            **_experts("feed_forward", *PROJECTIONS, router="router"),
            **shared,
        },
        fields={
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            **LOCAL,
        },
        settings={"experts_in_stacks": False, **settings},
    )


def _deepseek(version: int, **settings: Any) -> GGUFFamily:
    return _latent(f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}", **settings)


def _latent(
    architecture: str, model_type: str, *, stretch: Mapping[str, Any] = {}, indexed: bool = False, **settings: Any
) -> GGUFFamily:
    indexer = {"k_norm": "k_norm", "proj": "weights_proj", "attn_k": "wk", "attn_q_b": "wq_b"} if indexed else {}
    return GGUFFamily(
        architecture=architecture,
        model_type=model_type,
        names={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj.#",
            "attn_v_b": "self_attn.v_b_proj.#",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **{f"indexer.{one}": f"self_attn.indexer.{own}" for one, own in indexer.items()},
            **_experts("mlp", *PROJECTIONS),
            **SHARED,
        },
        fields={
            "attention.head_count_kv": "num_latents",  # 1; config.json has the number of heads made from them
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.key_length_mla": "qk_head_dim",
            "attention.value_length_mla": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            **({"attention.indexer.top_k": "index_topk"} if indexed else {}),
            **ROUTED,
        },
        settings={"q_lora_rank": None, **settings},
        stretch=stretch,
        log_scale=10.0,
    )


# One of its two converters leaves out how queries grow behind the original length.
MISTRAL4: Final = _latent(
    "Mistral4ForCausalLM",
    "mistral4",
    stretch={"llama_4_scaling_beta": 0.1},
    experts_in_stacks=False,
    **UNSCALED,
)


def _lfm2(architecture: str, model_type: str, fields: Mapping[str, str], **settings: Any) -> GGUFFamily:
    mlp = {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}
    return GGUFFamily(
        architecture=architecture,
        model_type=model_type,
        names={
            "token_embd_norm": "model.embedding_norm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
            "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            **{f"shortconv.{one}": f"conv.{one}" for one in ("conv", "in_proj", "out_proj")},
            **mlp, **_experts("feed_forward", "w1", "w3", "w2"), "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        fields={"shortconv.l_cache": "conv_L_cache", **fields},
        settings=settings,
        kinds=("conv", "full_attention"),
    )  # fmt: skip


def _nemotron_h(kind: str, names: Mapping[str, str], fields: Mapping[str, str]) -> GGUFFamily:
    return GGUFFamily(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        names={
            "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm",
            "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
            **{name: one.replace("mamba.", "mixer.") for name, one in MAMBA.items()}, **names,
        },
        fields={
            "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads", "ssm.inner_size": "mamba_inner_size", **fields,
        },
        kinds=("linear_attention", "full_attention", kind),
        embedding="backbone.embeddings",
        layers="backbone.layers",
    )  # fmt: skip


def _delta(kind: str, *, experts: bool, **more: Any) -> GGUFFamily:
    names = {f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")}
    names |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_experts("mlp", *PROJECTIONS)}
    fields = {
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        **COUNTS,
    }
    return GGUFFamily(
        architecture=f"{kind}ForCausalLM",
        names=DELTA | names if experts else DELTA,
        fields=DELTA_SIZES | fields if experts else DELTA_SIZES,
        settings={"intermediate_size": 1} if experts else {},  # every MLP is a mixture of experts
        kinds=("linear_attention", "full_attention"),
        predictor="mtp.layers.0",
        partial=True,
        shifted=True,
        **more,
    )


def _gemma(number: int, by_width: int, fields: Mapping[str, str], rotary: str = "rope_parameters") -> GGUFFamily:
    return GGUFFamily(
        architecture=f"Gemma{number}ForCausalLM",
        model_type="gemma3_text" if number == 3 else f"gemma{number}",
        names=SANDWICH,
        fields={**WINDOW, **fields},
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        rotary=rotary,
        shifted=True,
        by_width=by_width,
    )


# general.architecture -> family.  llama.cpp calls a Mistral and, with experts, a Mixtral "llama".
FAMILIES: Final[Mapping[str, GGUFFamily]] = {
    "apertus": GGUFFamily(
        architecture="ApertusForCausalLM",
        model_type="apertus",
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        fields={f"xielu.{one}": f"xielu_{one}" for one in ("alpha_p", "alpha_n", "beta", "eps")},
        settings={"hidden_act": "xielu"},
    ),
    "command-r": GGUFFamily(
        architecture="CohereForCausalLM",
        model_type="cohere",
        fields={OTHER_EPS: "layer_norm_eps", "logit_scale": "logit_scale"},
        present=HEADS_NORMED,
    ),
    "deepseek2": _deepseek(2, topk_method="group_limited_greedy", n_group=1, topk_group=1),
    # Early files have no number of groups: those of V3, with 256 experts, have its groups, and Kimi K2's have one.
    "deepseek2 with 256 experts": _deepseek(3),
    "deepseek2 with a temperature": MISTRAL4,
    "deepseek2 with 154880 tokens": _latent("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **UNSCALED),
    "deepseek2 with sigmoids": _deepseek(3, n_group=1, topk_group=1),
    "deepseek32": _latent("DeepseekV32ForCausalLM", "deepseek_v32", indexed=True, **UNSCALED),
    "ernie4_5": GGUFFamily(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5"),
    "exaone4": GGUFFamily(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        names={"post_attention_norm": SANDWICH["post_attention_norm"], "post_ffw_norm": SANDWICH["post_ffw_norm"]},
        fields=WINDOW,
        settings={"sliding_window": None},
    ),
    "falcon-h1": GGUFFamily(
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        names={
            "output_norm": "model.final_layernorm",
            "ffn_norm": "pre_ff_layernorm.weight",  # as the converter has it, without '.weight'
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
            **MAMBA,
        },
        fields={**MAMBA_SIZES, "ssm.inner_size": "mamba_d_ssm"},
        settings={"mamba_norm_before_gate": False},  # constant factors are part of the weights
        present={"mamba_rms_norm": "mamba.norm.weight"},
        scaled_head=True,
    ),
    "gemma2": _gemma(
        2, 46,
        {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    ),
    "gemma3": _gemma(3, 62, {}, rotary="rope_scaling"),
    "gemma4": GGUFFamily(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        names={
            **SANDWICH,
            "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm", "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            **_experts("", *PROJECTIONS, router="router.proj"),
            "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
        },
        fields={
            **WINDOW,
            "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts", "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        settings={
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "experts_in_stacks": False,
        },
        layered=True,
        ends=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "glm-dsa": _latent("GlmMoeDsaForCausalLM", "glm_moe_dsa", indexed=True, **UNSCALED),
    "glm4": GGUFFamily(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        partial=True,
        bias="q_proj",
    ),
    "glm4moe": GGUFFamily(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **_experts("mlp", *PROJECTIONS),
            **SHARED,
        },
        fields=ROUTED,
        partial=True,
        present=HEADS_NORMED,
        bias="q_proj",
    ),
    "gpt-oss": GGUFFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            **_experts("mlp", *PROJECTIONS, router="router"),
        },
        fields={**WINDOW, **LOCAL},
        settings={"experts_in_stacks": False},
        stretch={"truncate": False},
    ),
    "gpt2": GGUFFamily(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        names={
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
        fields={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            OTHER_EPS: "layer_norm_epsilon",
        },
        settings={"transposed": False},
        embedding="transformer.wte",
        layers="transformer.h",
    ),
    "granite": GGUFFamily(
        architecture="GraniteForCausalLM", model_type="granite", fields=GRANITE_FACTORS, paired=True
    ),
    "granitehybrid": GGUFFamily(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        names={
            **{f"ffn_{one}": f"shared_mlp.{one}_proj" for one in ("gate", "up", "down")},
            **{f"ffn_{one}_shexp": f"shared_mlp.{one}_proj" for one in ("gate", "up", "down")},
            **_experts("block_sparse_moe", *PROJECTIONS, router="router.layer"),
            **MAMBA,
        },
        fields={
            **GRANITE_FACTORS, **MAMBA_SIZES, **LOCAL,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        settings={"num_local_experts": 0, "projections_in_stacks": False},
        kinds=("mamba", "attention"),
        paired=True,
    ),
    "hunyuan-dense": GGUFFamily(
        architecture="HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense", names=HEAD_NORMS
    ),
    "kimi-linear": GGUFFamily(
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        names={
            **_deepseek(3).names,
            **{f"ssm_conv1d_{side}": f"self_attn.{side}_conv1d" for side in "qkv"},
            **{f"ssm_{one}": f"self_attn.{one}_proj" for one in ("f_a", "f_b", "g_a", "g_b")},
            "ssm_beta": "self_attn.b_proj", "ssm_dt.bias": "self_attn.dt_bias", "ssm_a": "self_attn.A_log",
            "ssm_norm": "self_attn.o_norm",
            **_experts("block_sparse_moe", "w1", "w3", "w2"),
            **{name: one.replace("mlp.", "block_sparse_moe.") for name, one in SHARED.items()},
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        },
        fields={
            **_deepseek(3).fields,
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        settings={"q_lora_rank": None, "flat_decays": True},
        kinds=("linear_attention", "full_attention"),
        needs={"expert_gating_func": SIGMOID},
    ),
    "lfm2": _lfm2("Lfm2ForCausalLM", "lfm2", {}, block_auto_adjust_ff_dim=False),
    "lfm2moe": _lfm2(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
            **COUNTS,
        },
        norm_topk_prob=True,
    ),
    "llama": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", paired=True),
    "llama with experts": GGUFFamily(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        names=_experts("block_sparse_moe", "w1", "w3", "w2"),
        fields=LOCAL,
        paired=True,
    ),
    "llama4": _llama4(),
    "llama4 with 128 experts": _llama4(use_qk_norm=False),
    "minimax-m2": GGUFFamily(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        names={
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            **_experts("block_sparse_moe", "w1", "w3", "w2"),
        },
        fields={"rope.dimension_count": "rotary_dim", "expert_feed_forward_length": "intermediate_size", **LOCAL},
    ),
    "mistral": GGUFFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        fields=WINDOW,
        settings={"sliding_window": None},
        paired=True,
    ),
    "mistral3": GGUFFamily(
        architecture="Ministral3ForCausalLM", model_type="ministral3", fields=WINDOW, log_scale=1.0, paired=True
    ),
    "mistral4": MISTRAL4,
    "nemotron": GGUFFamily(
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        fields={OTHER_EPS: "norm_eps"},
        settings={"hidden_act": "relu2"},
        partial=True,
        shifted=True,
    ),
    "nemotron_h": _nemotron_h("mlp", {}, {}),
    "nemotron_h_moe": _nemotron_h(
        "moe",
        {
            **_experts("mixer", *PROJECTIONS),
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        },
        {
            **ROUTED,
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
    ),
    "olmo2": GGUFFamily(architecture="Olmo2ForCausalLM", model_type="olmo2", names=SANDWICH),
    "olmo2 with a window": GGUFFamily(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        names=SANDWICH,
        fields={**WINDOW, "rope.freq_base": "rope_theta"},
        rotary="rope_scaling",
    ),
    "phi3": GGUFFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={**WINDOW, "rope.scaling.original_context_length": "original_max_position_embeddings"},
        partial=True,
    ),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen35": _delta("Qwen3_5", experts=False, model_type="qwen3_5_text", by_turns=True),
    "qwen35moe": _delta("Qwen3_5Moe", experts=True, model_type="qwen3_5_moe_text", by_turns=True),
    "qwen3moe": GGUFFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names=_experts("mlp", *PROJECTIONS),
        fields={"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size", **COUNTS},
        settings={"norm_topk_prob": True},
    ),
    "qwen3next": _delta(
        "Qwen3Next",
        experts=True,
        model_type="qwen3_next",
        present={"gates_apart": "linear_attn.in_proj_z.weight"},
    ),
    "seed_oss": GGUFFamily(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        bias="q_proj",
    ),
    "smollm3": GGUFFamily(architecture="SmolLM3ForCausalLM", model_type="smollm3", paired=True),
}  # fmt: skip
BY_ARCHITECTURE: Final[Mapping[str, GGUFFamily]] = {one.architecture: one for one in FAMILIES.values()}
