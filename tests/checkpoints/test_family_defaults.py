"""What a family takes where config.json does not say is what transformers takes."""

import math
import re
from typing import Any

import pytest
from transformers import GptOssConfig, Phi3Config, PretrainedConfig

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape
from engine.plugins.hookspecs import ModelContext
from engine.types.errors import WeightsError
from tests.models.checkpoints import NOT_PLAIN, PLAIN, configuration
from tests.models.test_families import hook_of

VARIANTS = {family: variant for variant, (family, _) in {**PLAIN, **NOT_PLAIN}.items() if family != "GPT2"}
HYBRIDS = {"Lfm2": "lfm2", "Qwen3Next": "qwen3-next", "Bamba": "bamba"}
WITH_WINDOWS = ("Qwen2", "Qwen3", "Qwen3Moe")


def shape_of(family: str, without: tuple[str, ...] = (), **changes: Any) -> DecoderShape:
    """Of a config.json as transformers writes it, changed."""
    table = {**configuration(VARIANTS.get(family, HYBRIDS.get(family, ""))).to_dict(), **changes}
    table = {name: value for name, value in table.items() if name not in without}
    architecture = f"{family}ForCausalLM"
    shape: DecoderShape = hook_of(architecture)(context=ModelContext(architecture, Fields(table, "config.json"), {}))
    return shape


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_with_longrope_one_set_of_factors_serves_every_length(family: str) -> None:
    """Longer sequences would need other keys from their first token on."""
    layers = shape_of(family).layers[::-1]
    attention = next(layer.attention for layer in layers if layer.attention.rotary is not None)
    turned = attention.rotary.size or attention.head_size
    short, long, length = [1.5] * (turned // 2), [3.0] * (turned // 2), {"original_max_position_embeddings": 64}
    scaling: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, **length}
    if turned != attention.head_size and not family.startswith("Deepseek"):  # whose rotated part has its own size
        scaling["partial_rotary_factor"] = turned / attention.head_size
    for factors in (long, short):
        whole = {**scaling, "long_factor": factors}
        sets = {"full_attention": whole, "sliding_attention": {"rope_theta": 1e4}} if family == "Gemma3" else whole
        read = shape_of(family, rope_parameters=sets, **length)
        for given, most, expected in ((0, 512, factors), (65, 512, factors), (64, 64, short), (9, 64, short)):
            shape = read.for_length(given)
            stretched = {one.factors for one in shape.rotaries if one.kind == "longrope"}
            assert (shape.max_len, stretched) == (512 if factors is short else most, {tuple(expected)})


@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_a_window_that_is_used_and_not_said_is_the_familys_own(family: str) -> None:
    used = {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 9999}
    default = type(configuration(VARIANTS[family]))(use_sliding_window=True).sliding_window
    rest = ("sliding_window", "layer_types")
    assert shape_of(family, rest, **used).layers[-1].attention.window == default == 4096
    assert shape_of(family, rest[1:], **used, sliding_window=None).layers[-1].attention.window == 0
    assert shape_of(family, rest, **{**used, "use_sliding_window": False}).layers[-1].attention.window == 0


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": None}, {"rope_parameters": None, "rope_scaling": {}}])
def test_a_gpt_oss_that_says_nothing_of_rotation_has_its_class_default(changes: dict[str, Any]) -> None:
    table = configuration(VARIANTS["GptOss"]).to_dict()
    without = () if changes else ("rope_parameters",)
    expected = shape_of("GptOss", rope_parameters=GptOssConfig(max_position_embeddings=512).rope_parameters)
    assert shape_of("GptOss", without, **changes) == expected
    assert (expected.layers[0].attention.rotary.kind, table["max_position_embeddings"]) == ("yarn", 512)


def test_a_phi_3_has_its_class_length_or_says_its_own_beside_the_rotary_settings() -> None:
    """transformers takes the class's for one that is inside of them alone."""
    name, default = "original_max_position_embeddings", Phi3Config().original_max_position_embeddings
    scaling = {**configuration(VARIANTS["Phi3"]).to_dict()["rope_parameters"]}
    assert scaling.pop(name) == 256
    long = {"max_position_embeddings": 4 * default}
    expected = shape_of("Phi3", **long, rope_parameters=scaling, **{name: default})
    assert (expected.max_len, expected.for_length(default).max_len) == (4 * default, default)
    for inner in ({}, {name: default}):
        assert shape_of("Phi3", (name,), **long, rope_parameters={**scaling, **inner}) == expected
    for place in ("rope_parameters", "rope_scaling"):
        with pytest.raises(WeightsError, match=rf"{place}: {name} is 256, expected it at the top level too"):
            shape_of("Phi3", (name,), **{place: {**scaling, name: 256}})


def test_a_gemma_3_that_caps_scores_is_refused() -> None:
    """transformers reads the setting and caps nothing."""
    with pytest.raises(WeightsError, match=r"attn_logit_softcapping is 50.0, expected null"):
        shape_of("Gemma3", attn_logit_softcapping=50.0)
    assert shape_of("Gemma3", attn_logit_softcapping=None).layers[0].attention.soft_cap == 0


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_the_norms_have_the_familys_own_epsilon(family: str):
    config: PretrainedConfig = configuration(VARIANTS[family])
    (eps_name,) = {"rms_norm_eps", "layer_norm_eps"} & set(config.to_dict())
    table = {name: value for name, value in config.to_dict().items() if name != eps_name}
    architecture = f"{family}ForCausalLM"
    shape = hook_of(architecture)(context=ModelContext(architecture, Fields(table, "config.json"), {}))
    expected = getattr(type(config)(), eps_name)
    assert shape.norm.eps == expected
    assert {getattr(layer.behind_mlp, "eps", expected) for layer in shape.layers} == {expected}
    assert {getattr(layer.before_mlp, "eps", expected) for layer in shape.layers} == {expected}


def test_deepseek_v3_as_it_was_released():
    """Its config.json is older than transformers 5, and spells some things as its own code does."""
    released = {
        "attention_bias": False,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    architecture = "DeepseekV3ForCausalLM"
    hook = hook_of(architecture)
    shape = hook(context=ModelContext(architecture, Fields(released, "config.json"), {}))
    attention, experts = shape.layers[3].attention, shape.layers[3].mlp
    assert (shape.num_layers, shape.num_kv_heads, shape.head_size, attention.latent_size) == (61, 1, 576, 512)
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (attention.rotary.attention_factor, attention.rotary.size, attention.rotary.interleaved) == (1.0, 64, True)
    assert (shape.layers[2].mlp.width, experts.width, experts.router.num_groups) == (18432, 8 * 2048 + 2048, 8)
    assert shape.attention_needs == ("latents",)
    (unread,) = shape.unread
    assert [name for name in ("model.layers.6.", "model.layers.61.") if re.search(unread, name)] == ["model.layers.61."]
    wrong = {"scoring_func": "softmax", "topk_group": 9, "num_key_value_heads": 64, "moe_layer_freq": 2, "n_group": 256}
    for name, value in wrong.items():
        with pytest.raises(WeightsError, match=name):
            hook(context=ModelContext(architecture, Fields({**released, name: value}, "config.json"), {}))


@pytest.mark.parametrize(
    ("family", "without", "changes"),
    [
        ("Lfm2", (), {"layer_types": ["conv"]}),
        ("Qwen3Next", (), {"layer_types": ["linear_attention"]}),
        ("Qwen3Next", ("layer_types",), {"full_attention_interval": 9}),
        ("Bamba", ("layer_types", "layers_block_type"), {"attn_layer_indices": []}),
    ],
)
def test_a_hybrid_without_attention_is_refused(family: str, without: tuple[str, ...], changes: dict[str, Any]) -> None:
    layers = configuration(HYBRIDS[family]).num_hidden_layers
    changes = {name: one * layers if name == "layer_types" else one for name, one in changes.items()}
    with pytest.raises(WeightsError, match="attention in at least one layer"):
        shape_of(family, without, **changes)
