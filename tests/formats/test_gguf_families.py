"""A GGUF file of each family computes what the checkpoint does, with tensors named by llama.cpp's own package."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.gguf_families import FAMILIES
from engine.formats.gguf import GGUFWeights
from engine.kernels.blocks import StoredWeight, block_products
from engine.layers.packing import Linears
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear.blocks import callboard_linear
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import on_ranks
from engine.types.errors import WeightsError
from tests.formats.gguf_files import ADAPTED, KEYS, OTHER_EPS, rounded, write
from tests.formats.test_quantized import PROMPT, assert_equal
from tests.models.checkpoints import HYBRID, LATER, NOT_PLAIN, VARIANTS, build, random_tokens, reference_logits
from tests.models.conftest import load
from tests.own_cache import use_own_cache

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")

WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
SHARED = {"expert_shared_feed_forward_length": "shared_intermediate_size"}
SSM = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
NEMOTRON = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
DELTA_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
ROUTED_EXPERTS = {key: name for key, name in ROUTED.items() if key != "leading_dense_block_count"}
GROUPED = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
LATENT = ROUTED | GROUPED | {"expert_weights_norm": "norm_topk_prob"}
INDEXED = LATENT | {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GEMMA4 = WINDOW | {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Variant -> general.architecture, and metadata below it that other families lack, by their names in config.json.
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "apertus": ("apertus", {}),
    "cohere-no-bias": ("command-r", {OTHER_EPS: "layer_norm_eps", "logit_scale": "logit_scale"}),
    "deepseek-v2-even": ("deepseek2", ROUTED | GROUPED),
    "deepseek-v3-even": ("deepseek2", LATENT),
    "deepseek-v32-even": ("deepseek32", INDEXED),
    "ernie4-5-plain": ("ernie4_5", {}),
    "exaone4": ("exaone4", WINDOW),
    "exaone4-no-window": ("exaone4", {}),
    "falcon-h1": ("falcon-h1", SSM | {"ssm.inner_size": "mamba_d_ssm"}),
    "falcon-h1-plain": ("falcon-h1", SSM | {"ssm.inner_size": "mamba_d_ssm"}),
    "gemma2": (
        "gemma2",
        {
            **WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": ("gemma3", WINDOW),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-equal-values": ("gemma4", GEMMA4),
    "gemma4-experts": (
        "gemma4",
        GEMMA4
        | {
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "glm4": ("glm4", {}),
    "glm-moe-dsa": ("glm-dsa", INDEXED),
    "glm4-moe-lite": ("deepseek2", LATENT),
    "glm4-moe": ("glm4moe", ROUTED | {"expert_weights_norm": "norm_topk_prob"}),
    "gpt-oss": ("gpt-oss", {**WINDOW, **EXPERTS}),
    "gpt2": (
        "gpt2",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            OTHER_EPS: "layer_norm_epsilon",
        },
    ),
    "granite": ("granite", GRANITE),
    "granite4-hybrid": ("granitehybrid", GRANITE | SSM | SHARED),
    "granite4-hybrid-nope": ("granitehybrid", GRANITE | SSM | SHARED | EXPERTS),
    "granite4-dense": ("granite", GRANITE | {"feed_forward_length": "shared_intermediate_size"}),
    "hunyuan": ("hunyuan-dense", {}),
    "kimi-linear": (
        "kimi-linear",
        ROUTED
        | {
            "expert_count": "num_local_experts",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "linear_head_dim",
        },
    ),
    "lfm2": ("lfm2", {"shortconv.l_cache": "conv_L_cache"}),
    "lfm2-moe-unscaled": (
        "lfm2moe",
        {
            "shortconv.l_cache": "conv_L_cache",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
    ),
    "llama-attention-biases": ("llama", {}),
    "llama4-plain": (
        "llama4",
        {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            **EXPERTS,
        },
    ),
    "minimax-m2": ("minimax-m2", {"expert_feed_forward_length": "intermediate_size", **EXPERTS}),
    "ministral3": ("mistral3", {}),
    "mistral4": ("deepseek2", LATENT),  # from Mistral's own format
    "mistral4-slower": ("mistral4", LATENT),
    "mixtral": ("llama", EXPERTS),
    "nemotron-plain": ("nemotron", {OTHER_EPS: "norm_eps"}),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "nemotron-h-experts": (
        "nemotron_h_moe",
        NEMOTRON
        | ROUTED_EXPERTS
        | {
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_group_count": "n_group",
            "expert_weights_norm": "norm_topk_prob",
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", WINDOW),
    "phi3": ("phi3", WINDOW),
    "phi4-longrope": ("phi3", {"rope.scaling.original_context_length": "original_max_position_embeddings"}),
    "qwen3-moe-all": (
        "qwen3moe",
        {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "qwen3-next-all": ("qwen3next", DELTA | DELTA_EXPERTS),
    "qwen3-5": ("qwen35", DELTA),
    "qwen3-5-biases": ("qwen35", DELTA),
    "qwen3-5-four": ("qwen35", DELTA),
    "qwen3-5-moe": ("qwen35moe", DELTA | DELTA_EXPERTS),
    "seed-oss": ("seed_oss", {}),
    "smollm3-four": ("smollm3", {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without what llama.cpp's files cannot say."""
    monkeypatch.setitem(VARIANTS, "ernie4-5-plain", ("Ernie4_5", {"head_dim": 16}))
    experts = NOT_PLAIN["qwen3-moe"][1] | {"mlp_only_layers": [], "norm_topk_prob": True}
    monkeypatch.setitem(VARIANTS, "qwen3-moe-all", ("Qwen3Moe", experts))
    monkeypatch.setitem(VARIANTS, "qwen3-next-all", ("Qwen3Next", HYBRID["qwen3-next"][1] | {"mlp_only_layers": []}))
    four = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    monkeypatch.setitem(VARIANTS, "qwen3-5-four", ("Qwen3_5", HYBRID["qwen3-5"][1] | four))
    monkeypatch.setitem(VARIANTS, "smollm3-four", ("SmolLM3", {"num_hidden_layers": 4}))
    monkeypatch.setitem(VARIANTS, "cohere-no-bias", ("Cohere", {"logit_scale": 0.5, "use_qk_norm": False}))
    for variant in ("deepseek-v2", "deepseek-v3", "deepseek-v32"):
        stem, changes = (NOT_PLAIN | LATER)[variant]
        even = {"rope_parameters": changes["rope_parameters"] | {"mscale": 0.8}}
        monkeypatch.setitem(VARIANTS, f"{variant}-even", (stem, changes | even))
    slower = {"rope_parameters": LATER["mistral4"][1]["rope_parameters"] | {"llama_4_scaling_beta": 0.1}}
    monkeypatch.setitem(VARIANTS, "mistral4-slower", ("Mistral4", LATER["mistral4"][1] | slower))
    monkeypatch.setitem(VARIANTS, "nemotron-plain", ("Nemotron", {"head_dim": 16}))
    hybrid = {"mamba_proj_bias": False, "position_embedding_type": None}
    monkeypatch.setitem(
        VARIANTS, "granite4-hybrid-nope", ("GraniteMoeHybrid", HYBRID["granite4-hybrid-experts"][1] | hybrid)
    )
    monkeypatch.setitem(
        VARIANTS, "lfm2-moe-unscaled", ("Lfm2Moe", HYBRID["lfm2-moe"][1] | {"routed_scaling_factor": 1.0})
    )
    experts = HYBRID["nemotron-h-experts"][1] | {"use_bias": False}
    monkeypatch.setitem(VARIANTS, "nemotron-h-experts", ("NemotronH", experts))
    falcon = HYBRID["falcon-h1-normed"][1] | {"attention_bias": False, "mamba_norm_before_gate": False}
    monkeypatch.setitem(VARIANTS, "falcon-h1-plain", ("FalconH1", falcon))
    monkeypatch.setitem(VARIANTS, "llama-attention-biases", ("Llama", {"attention_bias": True}))
    llama4 = {"no_rope_layers": None, "floor_scale": 8192, "attn_scale": 0.1, "attention_chunk_size": 8192}
    llama4 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    monkeypatch.setitem(VARIANTS, "llama4-plain", ("Llama4", LATER["llama4"][1] | llama4))
    monkeypatch.setitem(VARIANTS, "gemma2", ("Gemma2", NOT_PLAIN["gemma2"][1] | {"query_pre_attn_scalar": 16}))
    gemma3: dict[str, Any] = {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    gemma3["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    whole = {"full_attention": {"rope_type": "default", "rope_theta": 1e5}}
    gemma3["rope_parameters"] = NOT_PLAIN["gemma3"][1]["rope_parameters"] | whole
    monkeypatch.setitem(VARIANTS, "gemma3", ("Gemma3", NOT_PLAIN["gemma3"][1] | gemma3))


@pytest.mark.parametrize("variant", FILES)
def test_a_file_computes_what_the_checkpoint_does(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    write(tmp_path / "tiny.gguf", reference, *FILES[variant])
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


def test_a_file_with_two_sets_of_factors_is_read_beyond_its_original_length(tmp_path: Path) -> None:
    reference, tokens = build("phi4-longrope"), random_tokens(300, 2)
    write(tmp_path / "tiny.gguf", reference, *FILES["phi4-longrope"])
    got = Driver(load(read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")))).step({"a": tokens})["a"]
    torch.testing.assert_close(got, reference_logits(reference, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_gpt_oss_is_read_with_its_experts_in_blocks(kind: str, tmp_path: Path) -> None:
    """The files that are downloaded most have MXFP4 for the experts and floats for the rest."""
    reference = build("gpt-oss")
    with torch.no_grad():
        for name, stack_EIO in reference.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                rows = np.ascontiguousarray(stack_EIO.mT.numpy())
                stack_EIO.copy_(torch.from_numpy(rounded(rows, kind)).mT)
    write(tmp_path / "tiny.gguf", reference, *FILES["gpt-oss"], experts=kind)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert json.loads((directory / "config.json").read_text())["stored_formats"] == [kind]
    assert_equal(directory, reference)
    if block_products() is None:
        return
    kernel = callboard_linear(LinearContext("cpu", "float32", "none", stored_formats=(kind,)))
    model = load(read_model(directory), linears=Linears(kernel, kernel.head))
    assert all(isinstance(one.packed, StoredWeight) for layer in model.layers for one in layer.mlp.linears)
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["kimi-linear", "qwen3-5-moe", "qwen3-next-all"])
def test_recurrent_models_are_read_with_their_experts_in_blocks(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    with torch.no_grad():
        for name, stack_EOI in reference.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")) and stack_EOI.dim() == 3:
                stack_EOI.copy_(torch.from_numpy(rounded(stack_EOI.numpy(), "Q8_0")))
    write(tmp_path / "tiny.gguf", reference, *FILES[variant], experts="Q8_0")
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


@pytest.mark.parametrize("value_size", [16, 32])
def test_heads_with_a_value_keep_their_blocks_unless_two_of_them_share_one(value_size: int, tmp_path: Path) -> None:
    """A file has these heads in another order: of the two of each of two keys, first the first.  A block has 32."""

    def turned(weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI.unflatten(1, (2, 2, -1)).transpose(1, 2).flatten(1)

    reference = build("qwen3-5", linear_value_head_dim=value_size)
    with torch.no_grad():
        for name, weight_OI in reference.named_parameters():
            if ".linear_attn." in name and weight_OI.dim() == 2:
                outer = name.endswith(".out_proj.weight")
                stored_OI = torch.from_numpy(rounded((turned(weight_OI) if outer else weight_OI).numpy(), "Q8_0"))
                weight_OI.copy_(turned(stored_OI) if outer else stored_OI)
    write(tmp_path / "tiny.gguf", reference, *FILES["qwen3-5"], deltas="Q8_0")
    spec = read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(load(spec)).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)
    if block_products() is None:
        return
    kernel = callboard_linear(LinearContext("cpu", "float32", "none", stored_formats=("Q8_0",)))
    model = load(spec, linears=Linears(kernel, kernel.head))
    stored = GGUFWeights(spec).tensors["model.layers.0.linear_attn.out_proj.weight"]
    assert stored.num_bytes == prod(stored.shape) * (34 / 32 if value_size == 32 else 4)  # for the memory's estimate
    kept = [isinstance(one.packed, StoredWeight) for one in model.layers[0].recurrent.linears]
    assert kept == [True, value_size == 32]
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)


def test_early_files_of_qwen3_next_have_gates_beside_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ADAPTED, "qwen3next")
    reference = build("qwen3-next-all")
    write(tmp_path / "tiny.gguf", reference, *FILES["qwen3-next-all"])
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


def test_the_halves_of_a_stack_stay_in_blocks(tmp_path: Path) -> None:
    reference = build("gemma4-experts")
    with torch.no_grad():
        for name, stack_EOI in reference.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                stack_EOI.copy_(torch.from_numpy(rounded(stack_EOI.numpy(), "Q8_0")))
    write(tmp_path / "tiny.gguf", reference, *FILES["gemma4-experts"], experts="Q8_0")
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert_equal(directory, reference)
    if block_products() is None:
        return
    kernel = callboard_linear(LinearContext("cpu", "float32", "none", stored_formats=("Q8_0",)))
    model = load(read_model(directory), linears=Linears(kernel, kernel.head))
    assert all(isinstance(one.packed, StoredWeight) for one in model.layers[0].mlp.linears[2:])
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)


def test_texts_of_kimi_end_with_a_turn_too(tmp_path: Path) -> None:
    """Published files say [EOS] alone."""
    tokens = ["a", "<|im_end|>", "[EOS]", "[EOT]"]
    ids = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.pre": "kimi-k2"}
    write(tmp_path / "tiny.gguf", build("kimi-linear"), *FILES["kimi-linear"], metadata=ids)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [2, 1, 3]


def test_texts_of_gemma_4_end_with_a_turn_too(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<turn|>", "a", "<|tool_response>"]
    ids = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eom_token_id": 4}
    write(tmp_path / "tiny.gguf", build("gemma4"), *FILES["gemma4"], metadata=ids)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [1, 4, 3, 5]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope.dimension_count_swa", 8, "is 8, expected gemma4.attention.key_length_swa, 16"),
        ("rope.scaling.type", "yarn", "is 'yarn', expected none"),
        ("attention.key_length", 64, "'rope_freqs.weight': expected for half of gemma4.attention.key_length, 64"),
        ("attention.sliding_window_pattern", None, "is None, expected a list of 4: whether each layer has a window"),
        ("attention.head_count_kv", [2, 2], "expected a number, or 4 of them, one per layer"),
    ],
)
def test_layers_of_gemma_4_that_are_not_served_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("gemma4"), *FILES["gemma4"], metadata={f"gemma4.{key}": value})
    with pytest.raises(WeightsError, match=said):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")


@pytest.mark.parametrize("variant", ["deepseek-v32-even", "glm-moe-dsa", "glm4-moe-lite"])
def test_a_layer_that_predicts_tokens_is_left_out(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    write(tmp_path / "tiny.gguf", reference, *FILES[variant], behind=True)
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


def test_sequences_end_where_an_indexer_of_a_file_would_choose(tmp_path: Path) -> None:
    reference = build("glm-moe-dsa")
    write(tmp_path / "tiny.gguf", reference, *FILES["glm-moe-dsa"], metadata={"glm-dsa.attention.indexer.top_k": 96})
    assert read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")).shape.max_len == 96


def test_a_tied_head_that_lacks_its_factor_is_refused(tmp_path: Path) -> None:
    reference = build("falcon-h1-plain", tie_word_embeddings=True)
    write(tmp_path / "tiny.gguf", reference, *FILES["falcon-h1-plain"])
    with pytest.raises(WeightsError, match=r"there is no matrix 'output.weight', expected one: its weights have"):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")


def test_a_correction_of_scores_means_sigmoids(tmp_path: Path) -> None:
    reference = build("deepseek-v3-even")
    write(tmp_path / "tiny.gguf", reference, "deepseek2", LATENT, metadata={"deepseek2.expert_gating_func": None})
    assert_equal(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""), reference)


@pytest.mark.parametrize(
    "variant",
    [
        "deepseek-v2-even",
        "gemma4-experts",
        "gpt-oss",
        "kimi-linear",
        "llama4-plain",
        "qwen3-5-moe",
        "qwen3-next-all",
    ],
)
def test_ranks_read_their_parts_of_stacks(variant: str, tmp_path: Path) -> None:
    reference = build(variant)
    write(tmp_path / "tiny.gguf", reference, *FILES[variant])
    spec = read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))
    expected = reference_logits(reference, PROMPT)
    for logits in on_ranks(2, lambda comm: Driver(load(spec, comm=comm)).step({"a": PROMPT})["a"]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_every_family_is_checked() -> None:
    others = {
        "mixtral": "llama with experts",
        "olmo3": "olmo2 with a window",
        "deepseek-v3-even": "deepseek2 with sigmoids",
        "glm4-moe-lite": "deepseek2 with 154880 tokens",
        "mistral4": "deepseek2 with a temperature",
    }
    here = {others.get(variant, name) for variant, (name, _) in FILES.items()}
    elsewhere = {"deepseek2 with 256 experts", "llama4 with 128 experts", "mistral", "qwen2", "qwen3"}
    assert here | elsewhere == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "key", "number", "said"),
    [
        ("qwen3", "qwen3.expert_count", 2, "qwen3.expert_count is 2, expected none: this family is read without"),
        (
            "qwen3",
            "split.count",
            2,
            "split.count is 2, and 1 of the model's files are there; files of one model are named",
        ),
        ("kimi-linear", "kimi-linear.expert_gating_func", 1, "gating_func is 1, expected 2: others are not read"),
        (
            "qwen3moe",
            "qwen3moe.expert_count",
            2,
            r"'blk.0.ffn_up_exps.weight' has shape .4, 32., expected a matrix per e",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(architecture: str, key: str, number: int, said: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    for name in (f"{architecture}.{one}" for one in KEYS):
        writer.add_uint32(name, 2)
    writer.add_uint32(key, number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=said):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")
