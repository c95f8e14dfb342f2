"""The most downloaded text checkpoints of the hub, by what decides how they are served: their config.json, shortened.

Owns: which checkpoints, their architectures and their quantization.  Sizes are those of the class in transformers, with
fewer layers: whether a checkpoint is served does not depend on them.
"""

import json
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.plugins.families import read_model
from engine.plugins.verdict import how_served
from engine.types.errors import CallboardError

NUM_LAYERS = 4
AWQ = {
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq"}}
FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
STATIC_FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
    }
}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
LLAMA, QWEN2, QWEN3 = ("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")
QWEN3_MOE, DEEPSEEK = ("Qwen3MoeForCausalLM", "qwen3_moe"), ("DeepseekV3ForCausalLM", "deepseek_v3")
MISTRAL3, GEMMA3 = "Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration"
LONGROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
Kind = tuple[str, str] | tuple[str, str, str]
# Name -> architecture, model_type, and for a model that reads images the model_type of its text part; further settings.
CHECKPOINTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, {}),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, {"tie_word_embeddings": True}),
    "meta-llama/Llama-3.2-3B-Instruct": (LLAMA, {"tie_word_embeddings": True}),
    "meta-llama/Llama-3.3-70B-Instruct": (LLAMA, {}),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (("Llama4ForConditionalGeneration", "llama4", "llama4_text"), {}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (LLAMA, {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (QWEN2, {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": (QWEN2, {}),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (("DeepseekV2ForCausalLM", "deepseek_v2"), {"q_lora_rank": None}),
    "deepseek-ai/DeepSeek-V3.1": (DEEPSEEK, FP8),
    "deepseek-ai/DeepSeek-R1-0528": (DEEPSEEK, FP8),
    "deepseek-ai/DeepSeek-V3.2": (("DeepseekV32ForCausalLM", "deepseek_v32"), FP8),
    "deepseek-ai/DeepSeek-V4-Flash": (("DeepseekV4ForCausalLM", "deepseek_v4"), FP8),
    "moonshotai/Kimi-K2-Instruct-0905": (DEEPSEEK, {"model_type": "kimi_k2", **FP8}),
    "moonshotai/Kimi-K2-Thinking": (DEEPSEEK, {"model_type": "kimi_k2", **INT4}),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        ("KimiLinearForCausalLM", "kimi_linear"), {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN2, {"tie_word_embeddings": True}),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN2, {}),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (QWEN2, AWQ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (QWEN2, GPTQ),
    "Qwen/Qwen2.5-Coder-32B-Instruct": (QWEN2, {}),
    "Qwen/QwQ-32B": (QWEN2, {}),
    "Qwen/Qwen3-0.6B": (QWEN3, {"tie_word_embeddings": True}),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3, {"tie_word_embeddings": True}),
    "Qwen/Qwen3-8B": (QWEN3, {}),
    "Qwen/Qwen3-8B-FP8": (QWEN3, FP8),
    "Qwen/Qwen3-32B-AWQ": (QWEN3, AWQ),
    "nvidia/Qwen3-32B-NVFP4": (QWEN3, NVFP4),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (QWEN3_MOE, {}),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": (QWEN3_MOE, FP8),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (QWEN3_MOE, {}),
    "Qwen/Qwen3-Embedding-0.6B": (QWEN3, {"tie_word_embeddings": True}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (("Qwen3NextForCausalLM", "qwen3_next"), {"layer_types": HYBRID}),
    "Qwen/Qwen3.5-9B": (("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text"), {"layer_types": HYBRID}),
    "Qwen/Qwen3.6-35B-A3B": (
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text"), {"layer_types": HYBRID}
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text"), {}),
    "Qwen/Qwen3-VL-2B-Instruct": (("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text"), {}),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"), {}
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"), {}
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": (
        ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe", "qwen3_omni_moe_text"),
        {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4},
    ),
    "google/gemma-2-2b-it": (("Gemma2ForCausalLM", "gemma2"), {}),
    "google/gemma-2-9b-it": (("Gemma2ForCausalLM", "gemma2"), {}),
    "google/gemma-3-270m-it": (("Gemma3ForCausalLM", "gemma3_text"), {}),
    "google/gemma-3-1b-it": (("Gemma3ForCausalLM", "gemma3_text"), {}),
    "google/gemma-3-4b-it": ((GEMMA3, "gemma3", "gemma3_text"), {}),
    "google/gemma-3-27b-it": ((GEMMA3, "gemma3", "gemma3_text"), {}),
    "google/gemma-3n-E4B-it": (("Gemma3nForConditionalGeneration", "gemma3n", "gemma3n_text"), {}),
    "google/gemma-4-E4B-it": (("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"), {}),
    "google/gemma-4-31B-it": (("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"), {"attention_k_eq_v": True}),
    "google/gemma-4-26B-A4B-it": (
        ("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"),
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (("MistralForCausalLM", "mistral"), {"sliding_window": None}),
    "mistralai/Mistral-Nemo-Instruct-2407": (("MistralForCausalLM", "mistral"), {"sliding_window": None}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (("MixtralForCausalLM", "mixtral"), {"sliding_window": None}),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ((MISTRAL3, "mistral3", "mistral"), {"sliding_window": None}),
    "mistralai/Ministral-3-8B-Instruct-2512": ((MISTRAL3, "mistral3", "ministral3"), STATIC_FP8),
    "mistralai/Mistral-Small-4-119B-2603": ((MISTRAL3, "mistral3", "mistral4"), {}),
    "openai/gpt-oss-20b": (("GptOssForCausalLM", "gpt_oss"), MXFP4),
    "openai/gpt-oss-120b": (("GptOssForCausalLM", "gpt_oss"), MXFP4),
    "openai-community/gpt2": (("GPT2LMHeadModel", "gpt2"), {}),
    "microsoft/phi-4": (("Phi3ForCausalLM", "phi3"), {}),
    "microsoft/Phi-3.5-mini-instruct": (("Phi3ForCausalLM", "phi3"), LONGROPE),
    "microsoft/Phi-4-mini-instruct": (
        ("Phi3ForCausalLM", "phi3"), {"partial_rotary_factor": 0.75, "num_attention_heads": 24, **LONGROPE}
    ),
    "microsoft/phi-2": (("PhiForCausalLM", "phi"), {}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (LLAMA, {"tie_word_embeddings": True}),
    "HuggingFaceTB/SmolLM3-3B": (("SmolLM3ForCausalLM", "smollm3"), {}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (LLAMA, {}),
    "NousResearch/Hermes-3-Llama-3.1-8B": (LLAMA, {}),
    "zai-org/GLM-4-9B-0414": (("Glm4ForCausalLM", "glm4"), {}),
    "zai-org/GLM-4.5-Air": (("Glm4MoeForCausalLM", "glm4_moe"), {"head_dim": 128}),
    "zai-org/GLM-4.7-Flash": (("Glm4MoeLiteForCausalLM", "glm4_moe_lite"), {}),
    "zai-org/GLM-5": (("GlmMoeDsaForCausalLM", "glm_moe_dsa"), {}),
    "MiniMaxAI/MiniMax-M2": (("MiniMaxM2ForCausalLM", "minimax_m2"), FP8),
    "allenai/OLMo-2-1124-7B-Instruct": (("Olmo2ForCausalLM", "olmo2"), {}),
    "MiniMaxAI/MiniMax-Text-01-hf": (("MiniMaxForCausalLM", "minimax"), {}),
    "allenai/Olmo-3-7B-Instruct": (("Olmo3ForCausalLM", "olmo3"), {}),
    "allenai/Olmo-Hybrid-7B": (("OlmoHybridForCausalLM", "olmo_hybrid"), {}),
    "ibm-granite/granite-3.3-8b-instruct": (("GraniteForCausalLM", "granite"), {}),
    "ibm-granite/granite-4.0-micro": (
        ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        {"layer_types": ["attention"] * NUM_LAYERS, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "ibm-granite/granite-4.0-h-tiny": (
        ("GraniteMoeHybridForCausalLM", "granitemoehybrid"), {"layer_types": ["mamba", "mamba", "mamba", "attention"]}
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (
        ("Exaone4ForCausalLM", "exaone4"), {"layer_types": ["full_attention"] * NUM_LAYERS}
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (("Ernie4_5ForCausalLM", "ernie4_5"), {}),
    "baidu/ERNIE-4.5-21B-A3B-PT": (("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"), {}),
    "tencent/Hunyuan-7B-Instruct": (("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"), {"head_dim": 128}),
    "swiss-ai/Apertus-8B-Instruct-2509": (("ApertusForCausalLM", "apertus"), {}),
    "nvidia/Nemotron-Mini-4B-Instruct": (
        ("NemotronForCausalLM", "nemotron"), {"head_dim": 128, "num_key_value_heads": 8}
    ),
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": (LLAMA, {}),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (("NemotronHForCausalLM", "nemotron_h"), {"hybrid_override_pattern": "M-M*-"}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (("NemotronHForCausalLM", "nemotron_h"), {}),
    "CohereLabs/c4ai-command-r-08-2024": (("CohereForCausalLM", "cohere"), {}),
    "CohereLabs/c4ai-command-r7b-12-2024": (("Cohere2ForCausalLM", "cohere2"), {}),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (("SeedOssForCausalLM", "seed_oss"), {}),
    "tiiuae/Falcon3-7B-Instruct": (LLAMA, {}),
    "tiiuae/Falcon-H1-1.5B-Instruct": (("FalconH1ForCausalLM", "falcon_h1"), {}),
    "ibm-ai-platform/Bamba-9B-v2": (("BambaForCausalLM", "bamba"), {"attn_layer_indices": [1]}),
    "LiquidAI/LFM2-8B-A1B": (("Lfm2MoeForCausalLM", "lfm2_moe"), {"layer_types": ["conv"] * 3 + ["full_attention"]}),
    "tiiuae/falcon-7b-instruct": (("FalconForCausalLM", "falcon"), {}),
    "LiquidAI/LFM2-1.2B": (("Lfm2ForCausalLM", "lfm2"), {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "EleutherAI/pythia-160m": (("GPTNeoXForCausalLM", "gpt_neox"), {}),
    "facebook/opt-125m": (("OPTForCausalLM", "opt"), {}),
    "bigscience/bloom-560m": (("BloomForCausalLM", "bloom"), {}),
    "sentence-transformers/all-MiniLM-L6-v2": (("BertModel", "bert"), {}),
    "OpenGVLab/InternVL3-8B-hf": (("InternVLForConditionalGeneration", "internvl", "qwen2"), {}),
    "llava-hf/llava-1.5-7b-hf": (("LlavaForConditionalGeneration", "llava", "llama"), {}),
}  # fmt: skip
# Architecture, and how weights are stored, or a checkpoint -> the test of a tiny checkpoint in that layout.
PROOFS = {
    "LlamaForCausalLM": "published[Llama 3.1]",
    "Llama4ForConditionalGeneration": "text_part[Llama4]",
    "Qwen2ForCausalLM": "families[qwen2-tied-upper-window]",
    "Qwen2ForCausalLM awq": "quantized[Qwen2.5 AWQ]",
    "Qwen2ForCausalLM gptq": "quantized[Qwen2.5 GPTQ]",
    "Qwen3ForCausalLM": "families[qwen3-yarn-bias]",
    "Qwen3ForCausalLM awq": "quantized[Qwen3 AWQ]",
    "Qwen3ForCausalLM fp8": "quantized[Qwen3 FP8]",
    "Qwen3MoeForCausalLM": "published[Qwen3 MoE]",
    "Qwen3MoeForCausalLM fp8": "quantized[Qwen3 MoE FP8]",
    "Qwen2_5_VLForConditionalGeneration": "text_part[Qwen2_5_VL]",
    "Qwen3VLForConditionalGeneration": "text_part[Qwen3VL]",
    "Qwen3VLMoeForConditionalGeneration": "text_part[Qwen3VLMoe]",
    "Qwen3OmniMoeForConditionalGeneration": "text_part[thinker]",
    "DeepseekV2ForCausalLM": "families[deepseek-v2]",
    "DeepseekV3ForCausalLM fp8": "quantized[DeepSeek V3.1]",
    "DeepseekV3ForCausalLM compressed-tensors": "quantized[Kimi K2 Thinking]",
    "DeepseekV32ForCausalLM fp8": "quantized[DeepSeek V3.2]",
    "Gemma2ForCausalLM": "families[gemma2]",
    "Gemma3ForCausalLM": "families[gemma3]",
    "Gemma3ForConditionalGeneration": "text_part[Gemma3]",
    "Gemma3nForConditionalGeneration": "text_part[gemma3n_text]",
    "Gemma4ForConditionalGeneration": "text_part[gemma4_text]",
    "MistralForCausalLM": "families[mistral-window]",
    "MixtralForCausalLM": "families[mixtral]",
    "Mistral3ForConditionalGeneration": "text_part[Mistral3]",
    "Mistral3ForConditionalGeneration mistral4": "text_part[Mistral4]",
    "Mistral3ForConditionalGeneration fp8": "quantized[Ministral 3]",
    "GptOssForCausalLM mxfp4": "mxfp4[published]",
    "GPT2LMHeadModel": "families[gpt2]",
    "Phi3ForCausalLM": "published[Phi-4-mini]",
    "SmolLM3ForCausalLM": "families[smollm3]",
    "Glm4ForCausalLM": "families[glm4]",
    "Glm4MoeForCausalLM": "published[GLM-4.5]",
    "Glm4MoeLiteForCausalLM": "families[glm4-moe-lite]",
    "GlmMoeDsaForCausalLM": "families[glm-moe-dsa]",
    "MiniMaxM2ForCausalLM fp8": "quantized[MiniMax M2]",
    "Olmo2ForCausalLM": "families[olmo2]",
    "Olmo3ForCausalLM": "published[OLMo 3]",
    "OlmoHybridForCausalLM": "families[olmo-hybrid]",
    "MiniMaxForCausalLM": "families[minimax]",
    "KimiLinearForCausalLM": "published[Kimi-Linear]",
    "GraniteForCausalLM": "families[granite]",
    "GraniteMoeHybridForCausalLM": "published[Granite 4]",
    "ibm-granite/granite-4.0-h-tiny": "published[Granite 4 H]",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "published[Nemotron-H]",
    "Lfm2ForCausalLM": "published[LFM2]",
    "Lfm2MoeForCausalLM": "families[lfm2-moe]",
    "Qwen3NextForCausalLM": "published[Qwen3-Next]",
    "Qwen3_5ForConditionalGeneration": "text_part[Qwen3_5]",
    "Qwen3_5MoeForConditionalGeneration": "text_part[Qwen3_5Moe]",
    "NemotronHForCausalLM": "families[nemotron-h-experts]",
    "FalconH1ForCausalLM": "families[falcon-h1]",
    "BambaForCausalLM": "families[bamba]",
    "Exaone4ForCausalLM": "published[EXAONE 4]",
    "Ernie4_5ForCausalLM": "published[ERNIE 4.5]",
    "HunYuanDenseV1ForCausalLM": "published[Hunyuan]",
    "ApertusForCausalLM": "published[Apertus]",
    "NemotronForCausalLM": "published[Nemotron]",
    "CohereForCausalLM": "families[cohere]",
    "SeedOssForCausalLM": "families[seed-oss]",
    "InternVLForConditionalGeneration": "text_part[InternVL]",
    "LlavaForConditionalGeneration": "text_part[Llava]",
}
SMALLER = {"num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_routed_experts": 8, "num_local_experts": 8}
SMALLER |= {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0}


def config_of(name: str) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    (architecture, kind, *text), changes = CHECKPOINTS[name]
    config_class = CONFIG_MAPPING[text[0] if text else kind]
    known = set(vars(config_class())) | set(config_class.attribute_map)
    smaller = {one: value for one, value in SMALLER.items() if one in known}
    mine = {one: value for one, value in changes.items() if one in known and one not in ("model_type", "layer_types")}
    config = config_class(**smaller | mine).to_dict()
    for one in ("layer_types", "intermediate_size", "activation_sparsity_pattern"):
        if isinstance(config.get(one), list):
            config[one] = config[one][:NUM_LAYERS]
    if text:
        return {"architectures": [architecture], "model_type": kind, "text_config": config | changes, **changes}
    return config | {"architectures": [architecture]} | changes


def answer(name: str, directory: Path) -> str:
    """Return how ``callboard models`` says that it is served, or why not.  directory: for its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(name)))
    try:
        return how_served(read_model(directory))
    except CallboardError as error:
        reason = str(error).rpartition("config.json: ")[2].removeprefix("text_config: ")
        return f"refused: {reason.partition(', expected one of Cohere')[0]}"


def proof_of(name: str, said: str) -> str:
    """Return the test that proves an answer; '' for a refusal, and for what only transformers computes."""
    (architecture, _, *text), changes = CHECKPOINTS[name]
    if name in PROOFS and not said.startswith("refused"):
        return PROOFS[name]
    method = changes.get("quantization_config", {}).get("quant_method", "")
    of_text = PROOFS.get(f"{architecture} {''.join(text)}")
    return "" if said.startswith("refused") else of_text or PROOFS.get(f"{architecture} {method}".strip(), "")


def answers(directory: Path) -> dict[str, str]:
    """Return the answer for each checkpoint."""
    return {name: answer(name, directory / name) for name in CHECKPOINTS}
