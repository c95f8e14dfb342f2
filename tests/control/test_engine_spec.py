"""The engine of a configuration and a checkpoint, before weights are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.control.engine_spec import engine_spec
from engine.host.stages import Stages
from engine.types.errors import ConfigError
from tests.formats.stored import FP8, float8, write

BLOCKS = FP8 | {"weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("generation", "new_enough", "width", "settings", "kept"),
    [
        (9, True, 8, {}, "fp8"),
        (8, True, 8, {}, "none"),
        (9, False, 8, {}, "none"),
        (9, True, 1 << 20, {}, "none"),
        (9, True, 8, {"device": {"kind": "cpu"}}, "none"),
        (9, True, 8, {"model": {"quantization": "none"}}, "none"),
        (9, True, 8, {"model": {"dtype": "float16"}}, "none"),
    ],
)
def test_float8_stays_as_it_is_where_a_gpu_multiplies_it(
    generation: int,
    new_enough: bool,
    width: int,
    settings: dict[str, dict[str, str]],
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plugins.weight_type.gpu_generation", lambda: generation)
    monkeypatch.setattr("engine.plugins.weight_type.multiplies_float8_blocks", lambda: new_enough)
    monkeypatch.setattr("engine.plugins.weight_type.FLOAT8_WIDTH", width)
    directory, _ = write(tmp_path, float8((128, 128), "weight_scale_inv"), BLOCKS)
    sections = {
        "model": {"path": str(directory), "tokenizer": "none", **settings.get("model", {})},
        "device": settings.get("device", {"kind": "cuda"}),
    }
    found = engine_spec(build_config(Config(), sections), Stages())
    assert found.config.model.quantization == kept


@pytest.mark.parametrize(
    ("sections", "kept"),
    [
        ({}, "mxfp4"),
        ({"model": {"quantization": "mxfp4"}}, "mxfp4"),
        ({"model": {"quantization": "none"}}, "none"),
        ({"model": {"quantization": "int8"}}, "int8"),
        ({"model": {"dtype": "float16"}}, "none"),
        ({"device": {"kind": "cpu"}}, "none"),
        ({"device": {"kind": "cuda", "tensor_parallel": 2}}, "none"),  # 48 of 96 inputs are no whole groups
        ({"model": {"experts": "divided"}, "device": {"kind": "cuda", "tensor_parallel": 2}}, "mxfp4"),
    ],
)
def test_experts_in_four_bits_stay_so_where_the_kernel_reads_them(
    sections: dict[str, dict[str, Any]], kept: str, tmp_path: Path
) -> None:
    found = engine_spec(gpt_oss_config(tmp_path, sections), Stages())
    assert found.config.model.quantization == kept
    assert {one.four_bits for one in found.model.shape.experts} == {kept == "mxfp4"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"device": {"kind": "cpu"}}, "on a CPU linear.blocks keeps experts as they are stored"),
        ({"model": {"dtype": "float32"}}, "the kernel computes in bfloat16, not in float32"),
        ({"device": {"kind": "cuda", "tensor_parallel": 2}}, '2 ranks would cut groups .* model.experts="divided"'),
    ],
)
def test_experts_that_cannot_stay_in_four_bits_are_refused_if_they_must(
    sections: dict[str, dict[str, Any]], said: str, tmp_path: Path
) -> None:
    model = {"quantization": "mxfp4", **sections.get("model", {})}
    with pytest.raises(ConfigError, match=said):
        engine_spec(gpt_oss_config(tmp_path, {**sections, "model": model}), Stages())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 80}, "32 inputs share a scale, and 80 is no multiple of that"),
        ({"intermediate_size": 100}, "32 inputs share a scale, and 100 is no multiple of that"),
        ({"experts_in_stacks": False}, "the kernel is for the experts of gpt-oss"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "the kernel is for the experts of gpt-oss"),
    ],
)
def test_models_that_the_kernel_does_not_compute_become_floats(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = gpt_oss_config(tmp_path, {}, **changes)
    with caplog.at_level("INFO", "engine.plugins.weight_type"):
        found = engine_spec(config, Stages())
    assert found.config.model.quantization == "none"
    assert f"auto: model.quantization=none ({said})" in caplog.messages
    assert not any(one.four_bits for one in found.model.shape.experts)


def test_weights_that_are_not_stored_in_four_bits_cannot_be_kept_so(tmp_path: Path) -> None:
    directory, _ = write(tmp_path, float8((128, 128), "weight_scale_inv"), BLOCKS)
    sections = {"model": {"path": str(directory), "tokenizer": "none", "quantization": "mxfp4"}}
    with pytest.raises(ConfigError, match='"mxfp4": the checkpoint does not store its weights so; set it to "auto"'):
        engine_spec(build_config(Config(), {**sections, "device": {"kind": "cuda"}}), Stages())


@pytest.mark.parametrize(
    ("sections", "changes", "kept"),
    [
        ({}, {}, True),
        ({"model": {"quantization": "fp8"}}, {}, True),
        ({"model": {"quantization": "none"}}, {}, False),
        ({"model": {"dtype": "float16"}}, {}, False),
        ({"device": {"kind": "cpu"}}, {}, False),
        ({"device": {"kind": "cuda", "tensor_parallel": 2}}, {}, True),
        ({"device": {"kind": "cuda", "tensor_parallel": 4}}, {}, False),  # 64 of 256 inputs are no whole block
        ({"model": {"experts": "divided"}, "device": {"kind": "cuda", "tensor_parallel": 4}}, {}, True),
        ({}, {"moe_intermediate_size": 192}, False),
        ({}, {"weight_block_size": [64, 128]}, False),
    ],
)
def test_experts_in_float8_stay_so_where_the_kernel_reads_them(
    sections: dict[str, dict[str, Any]],
    changes: dict[str, Any],
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plugins.weight_type.gpu_generation", lambda: 9)
    monkeypatch.setattr("engine.plugins.weight_type.multiplies_float8_blocks", lambda: True)
    quantized = {"quant_method": "fp8", "weight_block_size": changes.pop("weight_block_size", [128, 128])}
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
        "vocab_size": 100, "max_position_embeddings": 256, "quantization_config": quantized, **changes,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = {"path": str(tmp_path), "tokenizer": "none", "load_format": "dummy", **sections.get("model", {})}
    merged = {"device": {"kind": "cuda"}, **sections, "model": model}
    found = engine_spec(build_config(Config(), merged), Stages())
    assert {one.float8 for one in found.model.shape.experts} == {kept}
    if kept:
        assert found.config.model.quantization == "fp8"


def gpt_oss_config(directory: Path, sections: dict[str, dict[str, Any]], **changes: Any) -> Config:
    """The configuration of a gpt-oss whose weights are drawn."""
    fields = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16",
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "vocab_size": 100,
        "max_position_embeddings": 256,
        "quantization_config": {"quant_method": "mxfp4"}, **changes,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(fields))
    model = {"path": str(directory), "tokenizer": "none", "load_format": "dummy", **sections.get("model", {})}
    return build_config(Config(), {"device": {"kind": "cuda"}, **sections, "model": model})
