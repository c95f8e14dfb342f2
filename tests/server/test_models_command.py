"""``callboard models`` says how a checkpoint is served from its description alone, or lists the architectures."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from server.cli import main
from tests.models.hub import answer, config_of


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["models", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen3ForCausalLM is served natively, from fp8 (float8)"),
        ("openai/gpt-oss-20b", "GptOssForCausalLM is served natively, from mxfp4 (float4)"),
        ("google/gemma-3-4b-it", "Gemma3ForCausalLM is served natively, its text part"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "MistralForCausalLM is served natively, its text part"),
        ("facebook/opt-125m", "OPTForCausalLM is served through transformers"),
    ],
)
def test_a_description_is_enough(
    name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    assert said(capsys, str(tmp_path)) == f"{tmp_path}: {expected}\n"
    assert expected.partition(" is served ")[2] == answer(name, tmp_path / "again")


def test_a_checkpoint_that_is_refused_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek-ai/DeepSeek-V4-Flash")))
    with pytest.raises(SystemExit) as ended:
        main(["models", str(tmp_path)])
    assert ended.value.code
    assert "it has layers of kind compressed_sparse_attention" in f"{ended.value.code} {capsys.readouterr().err}"


def test_of_a_name_on_the_hub_no_weights_are_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen/Qwen3-8B")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **more: asked.update(more) or str(tmp_path))
    assert said(capsys, "Qwen/Qwen3-8B") == "Qwen/Qwen3-8B: Qwen3ForCausalLM is served natively\n"
    assert asked["allow_patterns"] == ["*.json"]


def test_without_a_checkpoint_the_architectures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Qwen3ForCausalLM" in said(capsys)
