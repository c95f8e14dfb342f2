"""Two checkpoints are told apart by their shape and by their weights, and by nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from engine.checkpoints.fingerprint import SAMPLE_BYTES, check_fingerprint, fingerprint
from engine.errors import ConfigError
from engine.plugins.families import read_model
from tests.models.checkpoints import build, save


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
    assert len(changed) > SAMPLE_BYTES
    changed[-1] ^= 1
    weights.write_bytes(changed)
    expected = fingerprint(read_model(checkpoint), "safetensors")
    with pytest.raises(ConfigError, match=r"^rank 3: model.path=.*copy: not the checkpoint .*; its weights are others"):
        check_fingerprint(expected, read_model(copy), "safetensors", rank=3)
    check_fingerprint(fingerprint(read_model(checkpoint), "dummy"), read_model(copy), "dummy", rank=3)


def test_another_shape_is_noticed_without_weights_as_well(checkpoint: Path, tmp_path: Path) -> None:
    copy = copied(checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    expected = fingerprint(read_model(checkpoint), "dummy")
    with pytest.raises(ConfigError, match="its shape is another"):
        check_fingerprint(expected, read_model(copy), "dummy", rank=1)
