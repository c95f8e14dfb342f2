"""What a family takes where config.json does not say is what transformers takes."""

import pytest
from transformers import PretrainedConfig

from engine.checkpoints.fields import Fields
from engine.plugins.hookspecs import ModelContext
from tests.models.checkpoints import NOT_PLAIN, PLAIN, configuration
from tests.models.test_families import hook_of

VARIANTS = {family: variant for variant, (family, _) in {**PLAIN, **NOT_PLAIN}.items() if family != "GPT2"}


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_the_norms_have_the_familys_own_epsilon(family: str):
    config: PretrainedConfig = configuration(VARIANTS[family])
    table = {name: value for name, value in config.to_dict().items() if name != "rms_norm_eps"}
    architecture = f"{family}ForCausalLM"
    shape = hook_of(architecture)(context=ModelContext(architecture, Fields(table, "config.json"), {}))
    expected = type(config)().rms_norm_eps
    assert shape.norm.eps == expected
    assert {getattr(layer.behind_mlp, "eps", expected) for layer in shape.layers} == {expected}
    assert {getattr(layer.before_mlp, "eps", expected) for layer in shape.layers} == {expected}
