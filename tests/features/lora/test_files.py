"""What is no adapter for the model is refused before it is served, by one sentence that says what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.features.lora.files import AdapterRules, adapter_rules, read_adapter
from engine.plugins.families import read_model
from engine.types.errors import ConfigError, WeightsError
from tests.features.lora.made import make_adapter
from tests.models.checkpoints import build, save

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterRules]:
    root = tmp_path_factory.mktemp("made")
    reference = build("llama")
    spec = read_model(save(reference, root / "model"))
    folder = make_adapter(root / "adapters" / "good", reference, 1)
    return folder, adapter_rules(spec.shape, str(root / "adapters"), 8, "fast")


def changed(folder: Path, to: Path, config: dict[str, Any], change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy with other values in its configuration and other tensors."""
    shutil.copytree(folder, to)
    said = {**json.loads((to / "adapter_config.json").read_text()), **config}
    (to / "adapter_config.json").write_text(json.dumps(said))
    tensors = load_file(to / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, to / "adapter_model.safetensors")
    return to


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, 'peft_type is "IA3", expected "LORA"'),
    ({"use_dora": True}, "use_dora is true, expected false or nothing"),
    ({"bias": "lora_only"}, 'bias is "lora_only", expected "none" or nothing'),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"], expected'),
    ({"lora_alpha": -1}, "lora_alpha is -1, expected a positive number"),
    ({"alpha_pattern": {"(": 3}}, "alpha_pattern has '(', not a pattern"),
    ({"alpha_pattern": {"q_proj": "much"}}, "expected numbers"),
    ({"alpha_pattern": {"q_proj": 10**400}}, "expected numbers"),
    ({"lora_alpha": 10**400}, "expected a positive number"),
]
TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda held: held.pop(Q.format("B")), "self_attn.q_proj.lora_B.weight' is missing"),
    (lambda held: held.update({Q.format("A"): torch.zeros(4, 63)}), r"shape [4, 63], expected [rank, 64]"),
    (lambda held: held.update({Q.format("A"): torch.zeros(9, 64)}), "rank 9, expected 1 to 8; an operator can raise"),
    (lambda held: held.update({Q.format("A"): torch.zeros(3, 64)}), "lora_A has rank 3, lora_B has 4"),
    (lambda held: held.update({Q.format("A"): torch.zeros(4, 64, dtype=torch.int8)}), "dtype I8, expected one of"),
    (lambda held: held.update({Q.format("A"): torch.zeros(4)}), "shape [4], expected a matrix"),
    (lambda held: held.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}), "not lm_head"),
    (
        lambda held: held.update({"base_model.model.lora_embedding_A": torch.zeros(4, 64)}),
        "not served; expected lora_A",
    ),
    (lambda held: held.clear(), "holds no tensors"),
]


@pytest.mark.parametrize(("config", "reason"), CONFIGS, ids=lambda one: str(one)[:40])
def test_a_configuration_that_asks_for_more_is_refused_by_name(
    made: tuple[Path, AdapterRules], tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(WeightsError) as found:
        read_adapter(changed(made[0], tmp_path / "bad", config, lambda held: None), made[1])
    assert reason in str(found.value)


@pytest.mark.parametrize(("change", "reason"), TENSORS, ids=[reason for _, reason in TENSORS])
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    made: tuple[Path, AdapterRules], tmp_path: Path, change: Callable[[dict[str, Tensor]], object], reason: str
) -> None:
    with pytest.raises(WeightsError) as found:
        read_adapter(changed(made[0], tmp_path / "bad", {}, change), made[1])
    assert reason in str(found.value)


def test_a_missing_or_cut_file_is_refused(made: tuple[Path, AdapterRules], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"adapter_config\.json: no such file"):
        read_adapter(tmp_path, made[1])
    folder = changed(made[0], tmp_path / "cut", {}, lambda held: None)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match="truncated"):
        read_adapter(folder, made[1])


def test_the_digest_is_of_the_content_alone(made: tuple[Path, AdapterRules], tmp_path: Path) -> None:
    folder, rules = made
    first = read_adapter(folder, rules)
    assert read_adapter(shutil.copytree(folder, tmp_path / "elsewhere"), rules).digest == first.digest
    other = changed(folder, tmp_path / "other", {}, lambda held: held[Q.format("A")].add_(1))
    assert read_adapter(other, rules).digest != first.digest
    scaled = changed(folder, tmp_path / "scaled", {"lora_alpha": 9}, lambda held: None)
    assert read_adapter(scaled, rules).digest != first.digest


@pytest.mark.parametrize(
    ("variant", "numerics", "folder", "reason"),
    [
        ("llama", "fast", "nowhere", "no such directory"),
        ("llama", "invariant", "", "model.numerics=invariant"),
        ("gpt2", "fast", "", "no layer of this model takes adapters"),
    ],
)
def test_a_model_that_takes_none_says_so_at_start(
    tmp_path: Path, variant: str, numerics: str, folder: str, reason: str
) -> None:
    shape = read_model(save(build(variant), tmp_path)).shape
    with pytest.raises(ConfigError, match=reason):
        adapter_rules(shape, str(tmp_path / folder), 8, numerics)
