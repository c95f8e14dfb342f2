"""The family by callboard's conformance kit, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from callboard_arcee.family import callboard_model
from transformers import ArceeConfig, ArceeForCausalLM

from callboard.plugins import Fields, ModelContext, WeightsError
from callboard.plugins.testing import ConformanceError, check_model

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so large that logits differ
}


def reference(**changes: Any) -> ArceeForCausalLM:
    torch.manual_seed(0)
    return ArceeForCausalLM(ArceeConfig(**SIZES | changes)).eval()


def test_it_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    check_model(callboard_model, reference(mlp_bias=True), tmp_path)


def test_a_wrong_family_is_noticed(tmp_path: Path) -> None:
    """One that reads another base of the rotary frequencies."""

    def wrong(context: ModelContext) -> Any:
        context.fields.table["rope_parameters"]["rope_theta"] = 500.0
        return callboard_model(context)

    with pytest.raises(ConformanceError, match="logits are off by") as found:
        check_model(wrong, reference(), tmp_path)
    assert "2 ranks" in found.value.failures


def test_another_activation_is_refused() -> None:
    fields = Fields(SIZES | {"hidden_act": "silu"}, "config.json")
    with pytest.raises(WeightsError, match='hidden_act is "silu", expected "relu2"'):
        callboard_model(ModelContext("ArceeForCausalLM", fields))
