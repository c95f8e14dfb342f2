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
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family's files.  architecture, model_type: of config.json.

    names: tensors besides ``NAMES``, or other names for those; '#' stands for the number of an expert of a stack.
    fields: keys besides ``FIELDS``.  settings: what the family's files leave out.  rotary: the field for its settings.
    paired: whether rows of queries and keys are reordered, so that pairs that rotate are neighbours.
    shifted: whether the weights of norms have 1 added.
    by_width: number of layers of the model whose scores are scaled by hidden size / heads instead of the head size.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = {}
    fields: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    rotary: str = "rope_parameters"
    paired: bool = False
    shifted: bool = False
    by_width: int = 0


def _gemma(number: int, by_width: int, fields: Mapping[str, str], rotary: str = "rope_parameters") -> GGUFFamily:
    return GGUFFamily(
        architecture=f"Gemma{number}ForCausalLM",
        model_type="gemma3_text" if number == 3 else f"gemma{number}",
        names=SANDWICH,
        fields={"attention.sliding_window": "sliding_window", **fields},
        settings={"hidden_activation": "gelu_pytorch_tanh"},
        rotary=rotary,
        shifted=True,
        by_width=by_width,
    )


# general.architecture -> family.  llama.cpp calls a Mistral and, with experts, a Mixtral "llama".
FAMILIES: Final[Mapping[str, GGUFFamily]] = {
    "ernie4_5": GGUFFamily(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5"),
    "gemma2": _gemma(
        2, 46,
        {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    ),
    "gemma3": _gemma(3, 62, {}, rotary="rope_scaling"),
    "granite": GGUFFamily(
        architecture="GraniteForCausalLM",
        model_type="granite",
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        paired=True,
    ),
    "llama": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", paired=True),
    "llama with experts": GGUFFamily(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.#.w1",
            "ffn_up_exps": "block_sparse_moe.experts.#.w3",
            "ffn_down_exps": "block_sparse_moe.experts.#.w2",
        },
        fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        paired=True,
    ),
    "mistral": GGUFFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        fields={"attention.sliding_window": "sliding_window"},
        settings={"sliding_window": None},
        paired=True,
    ),
    "olmo2": GGUFFamily(architecture="Olmo2ForCausalLM", model_type="olmo2", names=SANDWICH),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": GGUFFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.#.gate_proj",
            "ffn_up_exps": "mlp.experts.#.up_proj",
            "ffn_down_exps": "mlp.experts.#.down_proj",
        },
        fields={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        settings={"norm_topk_prob": True},
    ),
    "smollm3": GGUFFamily(architecture="SmolLM3ForCausalLM", model_type="smollm3", paired=True),
}  # fmt: skip
BY_ARCHITECTURE: Final[Mapping[str, GGUFFamily]] = {one.architecture: one for one in FAMILIES.values()}
