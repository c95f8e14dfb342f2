"""The checkpoint that is made for a file of some tensors has links alone, so it takes no room."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.features.weight_updates.files import INDEX_FILE, overlay


def test_a_checkpoint_of_some_tensors_is_made_of_links(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    (base / "other.bin").write_bytes(bytes(9))
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    overlay(tmp_path / "one.safetensors", base, tmp_path / "first")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    overlay(tmp_path / "two.safetensors", tmp_path / "first", tmp_path / "second")
    made = {path.name: path for path in (tmp_path / "second").iterdir()}
    assert [name for name, path in made.items() if not path.is_symlink()] == [INDEX_FILE]
    assert all(not path.readlink().is_relative_to(tmp_path / "first") for path in made.values() if path.is_symlink())
    assert made["other.bin"].resolve() == base / "other.bin"
