"""Checkpoints whose weights may take the place of others: what they have in common, and those made of some tensors.

Owns: these checks, and the directory for a file of tensors.  Does not know: torch, ranks, requests.
"""

import json
from pathlib import Path
from typing import Final

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shards import INDEX_FILE, read_header, read_shards
from engine.types.errors import WeightsError


def check_same_model(old: ModelSpec, new: ModelSpec, load_format: str) -> None:
    """Raise WeightsError unless a checkpoint differs from the one that is served by its weights alone."""
    if load_format != "safetensors":
        raise WeightsError(f"model.load_format={load_format}: there are no weights that could change")
    if old.use.kind != "generate":
        raise WeightsError("a model that pools keeps the weights that it was started with; restart it")
    for what in ("architecture", "shape", "quantization", "eos_token_ids"):
        if (before := getattr(old, what)) != (after := getattr(new, what)):
            seen = f"{what} {after!r:.80} instead of {before!r:.80}" if what != "shape" else "another shape"
            raise WeightsError(f"{new.directory}: {seen}; weights may change, the model may not")


TENSORS: Final = ".safetensors"


def check_tensors(path: Path, base: Path) -> None:
    """Raise WeightsError unless a file's tensors have names and shapes of those in the checkpoint ``base``."""
    known = read_shards(base)
    for name, tensor in read_header(path).items():
        if name not in known:
            raise WeightsError(f"{path}: tensor {name!r} is not among the {len(known)} of {base}")
        if tensor.shape != known[name].shape:
            raise WeightsError(f"{path}: tensor {name!r} has shape {tensor.shape}, not {known[name].shape}")


def overlay(path: Path, base: Path, directory: Path) -> None:
    """Make a checkpoint with the tensors of the file ``path``, and those of ``base`` for the rest, by links.

    directory: does not exist.  Raises WeightsError for a tensor that the base does not have."""
    check_tensors(path, base)
    files = {name: tensor.file.resolve() for name, tensor in read_shards(base).items()}
    files |= dict.fromkeys(read_header(path), path.resolve())
    links = {file: f"{number}{TENSORS}" for number, file in enumerate(sorted({*files.values()}))}
    directory.mkdir(parents=True)
    for file, link in links.items():
        (directory / link).symlink_to(file)
    index = {"metadata": {}, "weight_map": {name: links[file] for name, file in files.items()}}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    for file in base.iterdir():
        if file.is_file() and file.suffix != TENSORS and file.name != INDEX_FILE:
            (directory / file.name).symlink_to(file.resolve())
