"""Two checkpoints are told apart by their shape and by their weights, and by nothing else."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.checkpoints.fingerprint import check_fingerprint, fingerprint
from engine.plugins.families import read_model
from engine.types.errors import ConfigError, WeightsError
from tests.models.checkpoints import build, configuration, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("checkpoint"), sharded=True)


def copied(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    return to


def test_a_copy_elsewhere_is_the_same_one(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path / "copy")
    (copy / "README.md").write_text("files of other kinds do not count")
    expected = fingerprint(read_model(checkpoint), "safetensors")
    check_fingerprint(expected, read_model(copy), "safetensors", rank=1)


def test_other_weights_of_the_same_shape_are_noticed(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path / "copy")
    weights = max(copy.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    expected = fingerprint(read_model(checkpoint), "safetensors")
    with pytest.raises(ConfigError, match=r"^rank 3: model.path=.*copy: not the checkpoint .*; its weights differ"):
        check_fingerprint(expected, read_model(copy), "safetensors", rank=3)
    check_fingerprint(fingerprint(read_model(checkpoint), "dummy"), read_model(copy), "dummy", rank=3)


@pytest.mark.parametrize("part", ["q_proj", "input_layernorm", "layers.1.", "embed_tokens"])
def test_a_fine_tune_of_some_matrices_is_another_checkpoint(tmp_path: Path, part: str) -> None:
    """Files are as large as those of a base whose other matrices are the same, byte for byte."""
    config = configuration("llama")
    config.num_hidden_layers, config.vocab_size = 8, 4096
    model = LlamaForCausalLM(config).eval()
    base = read_model(save(model, tmp_path / "base"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight[len(weight) // 2].mul_(1.5)
    tuned = read_model(save(model, tmp_path / "tuned"))
    assert fingerprint(base, "safetensors") != fingerprint(tuned, "safetensors")
    with pytest.raises(ConfigError, match="its weights differ"):
        check_fingerprint(fingerprint(base, "safetensors"), tuned, "safetensors", rank=1)


def test_which_of_two_files_a_tensor_is_read_from_counts(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    files = list(places["weight_map"].values())
    name, first = next((name, file) for name, file in places["weight_map"].items() if files.count(file) > 1)
    second = next(file for file in files if file != first)
    weights = load_file(copy / second)
    save_file({**weights, name: load_file(copy / first)[name] * 2}, copy / second)
    before = fingerprint(read_model(copy), "safetensors")
    places["weight_map"][name] = second
    index.write_text(json.dumps(places))
    assert fingerprint(read_model(copy), "safetensors") != before


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_model(copied(checkpoint, tmp_path / "copy"))

    def fails(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "shard")

    monkeypatch.setattr("hashlib.file_digest", fails)
    with pytest.raises(WeightsError, match=r"^shard: Input/output error"):
        fingerprint(spec, "safetensors")


def test_another_shape_is_noticed_without_weights_as_well(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    expected = fingerprint(read_model(checkpoint), "dummy")
    with pytest.raises(ConfigError, match="its shape differs"):
        check_fingerprint(expected, read_model(copy), "dummy", rank=1)
