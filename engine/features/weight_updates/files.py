"""Checkpoints whose weights may take the place of others: what they have in common, and those made of some tensors.

Owns: these checks, and the directory for files of tensors.  Does not know: torch, ranks, requests.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shards import INDEX_FILE, StoredTensor, read_header, read_shards
from engine.features.weight_updates.deltas import TensorReader, applied, changed_names, check_base
from engine.features.weight_updates.memory import HeldMemory, is_place
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
FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
SCALES: Final = ("_scale_inv", "_scale")  # behind the name of a weight in float8


def check_tensors(path: Path, tensors: dict[str, StoredTensor], known: dict[str, StoredTensor]) -> None:
    """Raise WeightsError unless a file's tensors have names and shapes of those that are known."""
    for name, tensor in tensors.items():
        if name not in known and any(name.removesuffix(end) in known for end in SCALES):
            continue  # of a weight that was in float8 and may be so again; ranks check that it fits
        if name not in known:
            raise WeightsError(f"{path}: tensor {name!r} is not among the {len(known)} of the present weights")
        if tensor.shape != known[name].shape:
            raise WeightsError(f"{path}: tensor {name!r} has shape {tensor.shape}, not {known[name].shape}")


def overlay(paths: Sequence[Path], base: Path, directory: Path, present: str, memory: HeldMemory) -> None:
    """Make a checkpoint with the tensors of files, the last one first, and those of ``base`` for the rest, by links.

    A weight in float8 that is sent in floats has no scale from then on.
    directory: does not exist.  present: digest of the base.  memory: gets the tensors that sparse deltas make.
    Raises WeightsError for a tensor that the base does not have, or that is for other weights."""
    known = read_shards(base)
    files = {name: _target(tensor.file) for name, tensor in known.items()}
    headers: dict[Path, dict[str, StoredTensor]] = {}  # of files whose tensors have taken the place of others
    reader = TensorReader()
    for path in paths:
        tensors = read_header(path)
        changed = changed_names(tensors, known)
        check_base(path, present, is_sparse=bool(changed))
        made = {name: applied(path, name, tensors, _now(name, files, known, headers), reader) for name in changed}
        parts = {name + end for name in changed for end in (".indices", ".values")}
        whole = {name: tensor for name, tensor in tensors.items() if name not in parts}
        check_tensors(path, whole, known)
        if twice := whole.keys() & made.keys():
            raise WeightsError(f"{path}: tensor {min(twice)!r} is there as a whole and as elements")
        files |= dict.fromkeys(whole, _target(path))
        if made:
            files |= dict.fromkeys(made, memory.write(made))
    for scale in _stale_scales(files, known, headers):
        del files[scale]
    links = {file: f"{number}{TENSORS}" for number, file in enumerate(sorted({*files.values()}))}
    directory.mkdir(parents=True)
    for file, link in links.items():
        (directory / link).symlink_to(file)
    index = {"metadata": {}, "weight_map": {name: links[file] for name, file in files.items()}}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    for other in base.iterdir():
        if other.is_file() and other.suffix != TENSORS and other.name != INDEX_FILE:
            (directory / other.name).symlink_to(other.resolve())


def _stale_scales(
    files: dict[str, Path], known: dict[str, StoredTensor], headers: dict[Path, dict[str, StoredTensor]]
) -> list[str]:
    """Return the scales of weights that were in float8 and are in floats now, but for scales that were sent."""
    widened = [
        name
        for name, one in known.items()
        if one.dtype in FLOAT8 and _now(name, files, known, headers).dtype not in FLOAT8
    ]
    scales = [name + end for name in widened for end in SCALES if name + end in known]
    return [scale for scale in scales if files[scale] == _target(known[scale].file)]


def linked(directory: Path) -> set[Path]:
    """Return the places that a checkpoint's links lead to."""
    return {Path(os.readlink(one)) for one in directory.iterdir() if one.is_symlink()}


def _now(
    name: str,
    files: dict[str, Path],
    known: dict[str, StoredTensor],
    headers: dict[Path, dict[str, StoredTensor]],
) -> StoredTensor:
    """Return a tensor as the files before have left it."""
    if (path := files[name]) == _target(known[name].file):
        return known[name]
    if path not in headers:
        headers[path] = read_header(path)
    return headers[path][name]


def _target(path: Path) -> Path:
    """Return the place that a link leads to; memory has no other name than its place."""
    if is_place(path):
        return path
    target = Path(os.readlink(path)) if path.is_symlink() else path
    return target if is_place(target) else path.resolve()
