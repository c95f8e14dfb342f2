"""A GGUF file of each family computes what the checkpoint does, with tensors named by llama.cpp's own package.

Owns: what the converter does to a family's numbers: norms with 1 added, reordered rows, stacks of experts.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.gguf_families import FAMILIES
from engine.types.errors import WeightsError
from tests.formats.test_gguf import KEYS
from tests.formats.test_quantized import assert_equal
from tests.models.checkpoints import NOT_PLAIN, VARIANTS, build

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")

EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)$")
# Variant -> general.architecture, and metadata below it that other families lack, by their names in config.json.
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "ernie4-5-plain": ("ernie4_5", {}),
    "gemma2": (
        "gemma2",
        {
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": ("gemma3", {"attention.sliding_window": "sliding_window"}),
    "granite": (
        "granite",
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "mixtral": ("llama", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}),
    "olmo2": ("olmo2", {}),
    "qwen3-moe-all": (
        "qwen3moe",
        {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "smollm3-four": ("smollm3", {}),
}
PAIRED = ("llama", "granite", "smollm3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without what llama.cpp's files cannot say."""
    monkeypatch.setitem(VARIANTS, "ernie4-5-plain", ("Ernie4_5", {"head_dim": 16}))
    experts = NOT_PLAIN["qwen3-moe"][1] | {"mlp_only_layers": [], "norm_topk_prob": True}
    monkeypatch.setitem(VARIANTS, "qwen3-moe-all", ("Qwen3Moe", experts))
    monkeypatch.setitem(VARIANTS, "smollm3-four", ("SmolLM3", {"num_hidden_layers": 4}))
    monkeypatch.setitem(VARIANTS, "gemma2", ("Gemma2", NOT_PLAIN["gemma2"][1] | {"query_pre_attn_scalar": 16}))
    gemma3: dict[str, Any] = {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    gemma3["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    whole = {"full_attention": {"rope_type": "default", "rope_theta": 1e5}}
    gemma3["rope_parameters"] = NOT_PLAIN["gemma3"][1]["rope_parameters"] | whole
    monkeypatch.setitem(VARIANTS, "gemma3", ("Gemma3", NOT_PLAIN["gemma3"][1] | gemma3))


def reordered(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as the converter writes them for llama."""
    return np.ascontiguousarray(array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape))


def write(path: Path, model: PreTrainedModel, architecture: str, keys: dict[str, str]) -> None:
    config, kind = model.config, {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    facts: dict[str, Any] = {key: getattr(config, name) for key, name in {**KEYS, **keys}.items()}
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    facts |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rotary["rope_theta"]}
    if getattr(config, "head_dim", None):
        facts["attention.key_length"] = config.head_dim
    for key, value in facts.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    model.save_pretrained(path.parent / "saved")
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(path.parent / "saved" / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        array = tensor.float().numpy()
        if found := EXPERT.search(stem):
            stacks.setdefault(f"{stem[: found.start()]}.experts.{found[2]}", {})[int(found[1])] = array
            continue
        if architecture in PAIRED and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = reordered(array, heads)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            array = array + 1
        writer.add_tensor(f"{names.get_name(stem)}.{end}", array)
    for name, members in stacks.items():
        writer.add_tensor(f"{names.get_name(name)}.weight", np.stack([members[one] for one in sorted(members)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("variant", FILES)
def test_a_file_computes_what_the_checkpoint_does(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    write(tmp_path / "tiny.gguf", reference, *FILES[variant])
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


def test_every_family_is_checked() -> None:
    here = {"llama with experts" if variant == "mixtral" else name for variant, (name, _) in FILES.items()}
    assert here | {"llama", "mistral", "qwen2", "qwen3"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "key", "said"),
    [
        ("qwen3", "qwen3.expert_count", "qwen3.expert_count is 2, expected none: this family is read without"),
        (
            "qwen3",
            "split.count",
            "split.count is 2, and 1 of the model's files are there; files of one model are named",
        ),
        ("qwen3moe", "qwen3moe.expert_count", r"'blk.0.ffn_up_exps.weight' has shape .4, 32., expected a matrix per e"),
    ],
)
def test_what_cannot_be_read_is_refused(architecture: str, key: str, said: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    for name in (*(f"{architecture}.{one}" for one in KEYS), key):
        writer.add_uint32(name, 2)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=said):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
