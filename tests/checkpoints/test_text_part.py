"""The text decoder of a model that reads images gives transformers' tokens, from a checkpoint as it is published."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.plugins.families import read_model
from engine.types.errors import WeightsError
from tests.models.checkpoints import VOCAB, YARN, build
from tests.models.conftest import load
from tests.models.published import assert_same, write

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
# What a published config.json does not have: its class has them as defaults, or the file is older than the field.
LATER = ("layer_types", "rope_parameters", "dtype", "tie_word_embeddings", "transformers_version", "use_cache")
MROPE = {"mrope_section": [2, 3, 3], "type": "mrope"}
MISTRAL = TEXT | {"model_type": "mistral", "sliding_window": None}
# Kind -> the text section, the vision section, and what a published config.json says in its own words.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        TEXT | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 11, "query_pre_attn_scalar": 16},
        TOWER,
        {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    ),
    "Mistral3": (MISTRAL, TOWER | {"model_type": "pixtral", "head_dim": 16}, {"rope_theta": 1e6}),
    "Llava": (MISTRAL, TOWER | {"model_type": "pixtral", "head_dim": 16}, {"rope_theta": 1e6}),
    "LlavaNext": (MISTRAL, TOWER | {"model_type": "clip_vision_model"}, {"rope_theta": 1e6}),
    "LlavaOnevision": (TEXT | {"model_type": "qwen2"}, TOWER | {"model_type": "siglip_vision_model"}, {}),
    "InternVL": (
        TEXT | {"model_type": "qwen3"},
        TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
        {"rope_theta": 1e6},
    ),
    "Qwen2_5_VL": (TEXT, BLOCKS, {"rope_theta": 1e6, "rope_scaling": MROPE}),
    "Qwen2VL": (
        TEXT,
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        {"rope_theta": 1e6, "rope_scaling": MROPE},
    ),
    "Qwen3VL": (
        TEXT,
        BLOCKS | {"deepstack_visual_indexes": [0]},
        {"rope_theta": 5e6, "rope_scaling": {**MROPE, "mrope_interleaved": True, "rope_type": "default"}},
    ),
}  # fmt: skip
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}
TEMPERED = YARN | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
TEMPERED |= {"llama_4_scaling_beta": 0.2, "type": "yarn"}
NEWER = {
    "Ministral3": (
        TEXT | {"model_type": "ministral3", "rope_parameters": TEMPERED, "sliding_window": None},
        PIXTRAL,
        {"rope_parameters": TEMPERED},
    ),
    "Mistral4": (
        TEXT
        | {
            "model_type": "mistral4",
            "head_dim": 24,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": TEMPERED,
        },
        PIXTRAL,
        {"rope_parameters": TEMPERED},
    ),
    "Llama4": (
        TEXT
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "floor_scale": 8,
        },
        TOWER | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
KINDS |= NEWER
WITHIN = {"Ministral3": "Mistral3", "Mistral4": "Mistral3"}  # kinds whose whole model has another name
SHARING = TEXT | {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 11,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
# Decoders written alone, under their names in the whole: the kind, the class, its text section, the prefix of tensors.
DECODERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # Embeddings of each layer, a window, keys and values that the last layers share.  Its vision tower needs timm.
    "gemma3n_text": (
        "Gemma3n",
        "Gemma3n",
        SHARING | {"intermediate_size": [96] * 5, "activation_sparsity_pattern": [0.5, *[0.0] * 4], "laurel_rank": 8},
        "model.language_model.",
    ),
    # Also other head sizes and other numbers of heads in full layers, whose keys are their values.
    "gemma4_text": (
        "Gemma4",
        "Gemma4",
        SHARING
        | {
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
        },
        "model.language_model.",
    ),
    "gemma4_text with experts": (
        "Gemma4",
        "Gemma4",
        TEXT
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 11,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "model.language_model.",
    ),
}
STACKED = KINDS["Qwen3VL"][0] | {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,  # with 32 the two orders of a stack would have one shape
}
KINDS["Qwen3VLMoe"] = (STACKED, *KINDS["Qwen3VL"][1:])
DELTA = TEXT | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
QUARTER = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_type": "default", "partial_rotary_factor": 0.25}
DELTA_WORDS = {"rope_parameters": {"rope_theta": 1e7, **QUARTER}, "full_attention_interval": 4}
KINDS["Qwen3_5"] = (DELTA, BLOCKS, DELTA_WORDS)
OWN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
KINDS["Qwen3_5Moe"] = (DELTA | OWN_EXPERTS, BLOCKS, DELTA_WORDS)
# Kinds for which larger weights make the reference itself 1e-4 off the exact logits: its deviation of weights.
CALM = {"Gemma3": 0.1, "Qwen3_5": 0.05, "Qwen3_5Moe": 0.05}
FLAT = ("Qwen2_5_VL", "Qwen2VL")  # kinds whose text section is the file itself


def publish(kind: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write the checkpoint in the published layout, and return transformers' reading of it."""
    text, vision, words = deepcopy(KINDS[kind])
    kind = WITHIN.get(kind, kind)
    architecture = f"{kind}ForConditionalGeneration"
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=kind == "Gemma3"
    )
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.dim() > 1 and "language_model" in name:
                weight.normal_(0, CALM.get(kind, 0.2))
    model.save_pretrained(directory)
    if kind == "Qwen3VLMoe":  # transformers 5 reads the published order of a stack, and writes another
        path = directory / "model.safetensors"
        stored = load_file(path)
        turned = {name: one.mT.contiguous() for name, one in stored.items() if ".experts." in name}
        save_file(stored | turned, path, metadata={"format": "pt"})
    if kind == "Qwen3_5Moe":  # published in stacks, which transformers 5 reads, and writes as single experts
        save_file(in_stacks(load_file(path := directory / "model.safetensors")), path, metadata={"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    section = {name: value for name, value in written.pop("text_config").items() if name not in LATER} | words
    section = {name: value for name, value in section.items() if changes.get(name, value) is not ...}
    written = {name: value for name, value in written.items() if name not in LATER} | {"torch_dtype": "bfloat16"}
    if kind in FLAT:
        written = section | written | {"tie_word_embeddings": False}
    else:
        written["text_config"] = section
    (directory / "config.json").write_text(json.dumps(written))
    return (
        getattr(transformers, architecture)
        .from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def in_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of single experts as stacks, with the gates before the products up."""
    names = [name for name in tensors if ".experts.0.gate_proj." in name]
    for name in names:
        before = name.partition(".experts.")[0]
        single = {
            kind: torch.stack([tensors.pop(f"{before}.experts.{number}.{kind}_proj.weight") for number in range(6)])
            for kind in ("gate", "up", "down")
        }
        tensors[f"{before}.experts.gate_up_proj"] = torch.cat((single["gate"], single["up"]), 1)
        tensors[f"{before}.experts.down_proj"] = single["down"]
    assert names
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_alone_gives_the_tokens_of_its_class(name: str, tmp_path: Path) -> None:
    kind, stem, text, prefix = DECODERS[name]
    config_class = CONFIG_MAPPING[name.split()[0]]
    torch.manual_seed(5)
    reference = getattr(transformers, f"{stem}ForCausalLM")(
        config_class(**deepcopy(text), attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    reference.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else f"language_model.{name}": one
        for name, one in stored.items()
    }
    tower = f"{prefix.partition('language_model')[0]}vision_tower.patch_conv.weight"
    section = text | {"model_type": name.split()[0]}
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": kind.lower(),
        "text_config": section,
        "vision_config": {},
        "dtype": "bfloat16",
    }
    write(tmp_path, config, tensors | {tower: torch.zeros(2)})
    assert_same(tmp_path, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_layout_gives_the_tokens_of_transformers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = publish(kind, tmp_path)
    with caplog.at_level("INFO"):
        assert_same(tmp_path, reference)
    assert f"{WITHIN.get(kind, kind)}ForConditionalGeneration: its text decoder is served; not read: " in caplog.text
    assert "tensors of vis" in caplog.text


def test_the_thinker_of_a_model_that_speaks_is_its_text_part(tmp_path: Path) -> None:
    reference = build("qwen3-moe")
    reference.save_pretrained(tmp_path)
    tensors = {f"thinker.{name}": one for name, one in load_file(tmp_path / "model.safetensors").items()}
    others = ("thinker.visual.patch_embed", "thinker.audio_tower.conv1", "talker.model.norm", "code2wav.decoder.0")
    tensors |= {f"{name}.weight": torch.zeros(2) for name in others}
    text = reference.config.to_dict() | {"model_type": "qwen3_omni_moe_text", "rope_scaling": MROPE}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    thinker = {"text_config": text, "audio_config": {}, "vision_config": {}, "model_type": "qwen3_omni_moe_thinker"}
    architecture = "Qwen3OmniMoeForConditionalGeneration"
    config = {"architectures": [architecture], "model_type": "qwen3_omni_moe", "thinker_config": thinker}
    assert_same(write(tmp_path, config | {"talker_config": {}, "dtype": "bfloat16"}, tensors), reference)


def test_what_a_published_gemma_3_leaves_out_has_the_values_of_its_class(tmp_path: Path) -> None:
    publish("Gemma3", tmp_path, num_attention_heads=..., num_key_value_heads=..., max_position_embeddings=...)
    spec = read_model(tmp_path)
    assert (spec.shape.num_heads, spec.shape.num_kv_heads, spec.max_len) == (8, 4, 131072)
    assert spec.shape.tied


def test_settings_beside_the_text_section_count(tmp_path: Path) -> None:
    publish("Mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"eos_token_id": [1, 5], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model(tmp_path)
    assert (spec.dtype, spec.eos_token_ids, str(spec.quantization)) == ("bfloat16", (1, 2, 5), "fp8 (float8)")
    assert (spec.architecture, spec.config["architectures"]) == (
        "MistralForCausalLM",
        ["Mistral3ForConditionalGeneration"],
    )


def test_a_decoder_that_this_kind_does_not_have_is_refused(tmp_path: Path) -> None:
    publish("Mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mamba"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match='text_config: model_type is "mamba", expected one of mistral, ministral3'):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["model.stranger.weight", "language_model.model.layers.7.mlp.up_proj.weight"])
def test_a_tensor_that_is_of_no_known_part_is_named(name: str, tmp_path: Path) -> None:
    publish("Mistral3", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(2)}, path)
    with pytest.raises(WeightsError, match="has no place in MistralForCausalLM"):
        load(read_model(tmp_path))
