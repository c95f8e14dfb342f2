"""What a family takes where config.json does not say is what transformers takes."""

import math
import re

import pytest
from transformers import PretrainedConfig

from engine.checkpoints.fields import Fields
from engine.errors import WeightsError
from engine.plugins.hookspecs import ModelContext
from tests.models.checkpoints import NOT_PLAIN, PLAIN, configuration
from tests.models.test_families import hook_of

VARIANTS = {family: variant for variant, (family, _) in {**PLAIN, **NOT_PLAIN}.items() if family != "GPT2"}


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
