"""Filling a model's parameters from a checkpoint, tensor by tensor, each rank only its own part.

Owns: the order of reading, the checks that everything fits, the progress bar.
Does not know: what a layer computes, how a checkpoint is found.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.errors import WeightsError
from engine.layers.comm import Comm
from engine.layers.weights import WeightSlice
from engine.models.checkpoint import ModelSpec
from engine.models.decoder import Decoder
from engine.models.shards import StoredTensor, read_shards

LOADABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tables that older exports saved and that are computed here.
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
DUMMY_SCALE = 0.02


def load_model(
    spec: ModelSpec,
    comm: Comm,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["safetensors", "dummy"],
    seed: int,
    progress: bool,
) -> Decoder:
    """Build this rank's part of the model and fill it.

    load_format 'dummy' draws every tensor from ``seed`` and its name, so all ranks and all numbers of ranks
    agree.  progress shows a bar on stderr.  All names, shapes and files are checked before memory is allocated.
    Raises WeightsError naming file and tensor; ConfigError if the ranks cannot share the model.
    """
    # On the meta device a model has shapes and no memory.
    plan = Decoder(spec.shape, comm, torch.device("meta"), dtype)
    stored: dict[str, StoredTensor] = {}
    if load_format == "safetensors":
        stored = read_shards(spec.directory)
        _check_names(spec, plan.slices(), stored)
    try:
        model = Decoder(spec.shape, comm, device, dtype)
    except RuntimeError as error:  # What torch raises when it cannot allocate, on every device.
        needed = plan.parameter_bytes / 2**30
        raise WeightsError(f"{spec.directory}: its weights need {needed:.1f} GiB, too much for {device}") from error
    with torch.inference_mode():
        if load_format == "dummy":
            _draw(model.slices(), seed)
        else:
            _read(list(model.slices()), stored, progress)
        model.pack()
    return model


def _check_names(spec: ModelSpec, slices: Iterable[WeightSlice], stored: dict[str, StoredTensor]) -> None:
    """Every tensor the model wants is there in the right shape and type, and there is none it does not know."""
    wanted = {one.source: one.shape for one in slices}
    for name, shape in wanted.items():
        if name not in stored:
            raise WeightsError(f"{spec.directory}: tensor {name!r} of shape {list(shape)} is missing from the weights")
        tensor = stored[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, config.json expects {list(shape)}"
            )
        if tensor.dtype not in LOADABLE:
            raise WeightsError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, expected one of {', '.join(LOADABLE)}"
            )
    for name in sorted(stored.keys() - wanted.keys()):
        tied_copy = spec.shape.tied and name == "lm_head.weight"
        if not tied_copy and not HARMLESS.fullmatch(name):
            raise WeightsError(f"{stored[name].file}: tensor {name!r} has no place in {spec.architecture}")


def _read(slices: Iterable[WeightSlice], stored: dict[str, StoredTensor], progress: bool) -> None:
    by_file: defaultdict[Path, list[WeightSlice]] = defaultdict(list)
    for one in slices:
        by_file[stored[one.source].file].append(one)
    total = sum(stored[one.source].num_bytes * one.length // max(1, one.shape[one.dim]) for one in slices)
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, wanted in sorted(by_file.items()):
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for one in wanted:
                        part = _part(file.get_slice(one.source), one)
                        _check_finite(part, one.source, path)
                        _fill(one, part)
                        bar.update(part.nbytes)
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path}: {error}") from None


def _part(source: Any, wanted: WeightSlice) -> Tensor:
    """Only the rows or columns that this rank wants leave the file.  source: a slice object of safetensors."""
    part = slice(wanted.start, wanted.start + wanted.length)
    read: Tensor = source[part] if wanted.dim == 0 else source[:, part]
    return read


def _fill(wanted: WeightSlice, part: Tensor) -> None:
    padding = wanted.target.shape[wanted.dim] - wanted.length
    wanted.target.narrow(wanted.dim, 0, wanted.length).copy_(part)
    wanted.target.narrow(wanted.dim, wanted.length, padding).zero_()


def _check_finite(part: Tensor, name: str, path: Path) -> None:
    """A NaN or infinity would reach every token.  One pass without a temporary: a NaN wins in aminmax."""
    if part.numel() and not all(math.isfinite(bound.item()) for bound in part.aminmax()):
        raise WeightsError(f"{path}: tensor {name!r} contains NaN or infinity; the file is damaged")


def _draw(slices: Iterable[WeightSlice], seed: int) -> None:
    for one in slices:
        digest = hashlib.sha256(f"{seed}/{one.source}".encode()).digest()
        generator = torch.Generator(one.target.device).manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.empty(one.shape, device=one.target.device).normal_(0, DUMMY_SCALE, generator=generator)
        if len(one.shape) == 1 and one.source.endswith(".weight"):
            drawn += 1  # A norm's weight: around 0 it would silence its layer.
        _fill(one, drawn.narrow(one.dim, one.start, one.length))
