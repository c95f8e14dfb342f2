"""Filling a model's parameters from a checkpoint, tensor by tensor, each rank only its own part.

Owns: the order of reading, the checks that everything fits, the progress bar.
Does not know: what a layer computes, how a checkpoint is found.
"""

import hashlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.shards import StoredTensor, read_shards
from engine.errors import WeightsError
from engine.kernels.choice import choose_kernels
from engine.layers.comm import Comm
from engine.layers.weights import WeightSlice
from engine.models.decoder import Decoder
from engine.models.weight_copies import WeightCopies, copies_to

log = logging.getLogger(__name__)

LOADABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tables that older exports saved and that are computed here.
HARMLESS = re.compile(r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(bias|masked_bias))")
DUMMY_SCALE = 0.02
COMPARED_ROWS = 4096


def load_model(
    spec: ModelSpec,
    comm: Comm,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["safetensors", "dummy"],
    seed: int,
    progress: bool,
    check_room: Callable[[int], None] | None = None,
) -> Decoder:
    """Build this rank's part of the model and fill it.

    load_format 'dummy' draws every tensor from ``seed`` and its name, so all ranks and all numbers of ranks
    agree.  progress shows a bar on stderr.  All names, shapes and files are checked before memory is allocated, and
    check_room is told how much that will be; it raises what says that there is too little.
    Raises WeightsError naming file and tensor; ConfigError if the ranks cannot share the model.
    """
    shape, stored = spec.shape, dict[str, StoredTensor]()
    if load_format == "safetensors":
        stored = _with_prefix(shape, read_shards(spec.directory))
        if shape.tied and _has_own_head(shape, stored, dtype):
            head, embedding = shape.names.head, shape.names.embedding
            log.warning(
                "%s: tie_word_embeddings is true, but %s is another than %s: not tied", spec.directory, head, embedding
            )
            shape = msgspec.structs.replace(shape, tied=False)
    # On the meta device a model has shapes and no memory.
    plan = Decoder(shape, comm, torch.device("meta"), dtype)
    if load_format == "safetensors":
        _check_names(spec, plan.slices(), stored)
    if check_room is not None:
        check_room(loading_bytes(plan, device, load_format))
    try:
        model = Decoder(shape, comm, device, dtype)
    except RuntimeError as error:  # What torch raises when it cannot allocate, on every device.
        needed = plan.parameter_bytes / 2**30
        raise WeightsError(f"{spec.directory}: its weights need {needed:.1f} GiB, too much for {device}") from error
    with torch.inference_mode():
        if load_format == "dummy":
            _draw(model.slices(), seed)
        else:
            _read(list(model.slices()), stored, copies_to(device), progress)
        model.pack(choose_kernels(device))
    return model


def loading_bytes(plan: Decoder, device: torch.device, load_format: Literal["safetensors", "dummy"]) -> int:
    """What loading takes of the device's memory at its worst.  plan: of one rank, on the meta device.

    Beside the parameters: the largest tensor once more, drawn as a whole, or as much as the rank wants of it, read and
    laid out on a CPU; and on a CPU the table of a tied LM head, which is kept in both layouts.  What a GPU has beside
    them, two buffers as they arrive, is little."""
    on_cpu = device.type == "cpu"
    largest = 0
    if load_format == "dummy":
        largest = max(math.prod(one.shape) for one in plan.slices())
    elif on_cpu:
        largest = max(math.prod(one.shape) * one.length // max(1, one.shape[one.dim]) for one in plan.slices())
    tied = plan.embedding.weight.nbytes if on_cpu and plan.head is plan.embedding else 0
    return plan.parameter_bytes + tied + largest * torch.float32.itemsize


def _with_prefix(shape: DecoderShape, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names that the shape has; of a model saved without its head, the prefix is missing."""
    table = f"{shape.names.embedding}.weight"
    prefix, _, bare = table.partition(".")
    if table in stored or bare not in stored:
        return stored
    return {f"{prefix}.{name}": tensor for name, tensor in stored.items()}


def _check_names(spec: ModelSpec, slices: Iterable[WeightSlice], stored: dict[str, StoredTensor]) -> None:
    """Every tensor the model wants is there in the right shape and type, and there is none it does not know."""
    wanted = {one.source: one.stored_shape for one in slices}
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
        if name != f"{spec.shape.names.head}.weight" and not HARMLESS.fullmatch(name):
            raise WeightsError(f"{stored[name].file}: tensor {name!r} has no place in {spec.architecture}")


def _has_own_head(shape: DecoderShape, stored: dict[str, StoredTensor], dtype: torch.dtype) -> bool:
    """Whether the LM head of a tied model is there and is not the embedding once more.  transformers 5 unties it then.

    An equal one is common, and loading it would cost its memory for nothing."""
    table, own = f"{shape.names.embedding}.weight", f"{shape.names.head}.weight"
    if table not in stored or own not in stored:
        return False
    embedding, head = stored[table], stored[own]
    if any(
        one.shape != (shape.vocab_size, shape.hidden_size) or one.dtype not in LOADABLE for one in (embedding, head)
    ):
        return True  # and so ``_check_names`` sees it
    with safe_open(embedding.file, "pt") as file, safe_open(head.file, "pt") as other:
        tables = file.get_slice(embedding.name), other.get_slice(head.name)
        for start in range(0, shape.vocab_size, COMPARED_ROWS):
            ours, theirs = (one[start : start + COMPARED_ROWS].to(dtype) for one in tables)
            if not torch.equal(ours, theirs):
                return True
    return False


def _read(slices: Iterable[WeightSlice], stored: dict[str, StoredTensor], copies: WeightCopies, progress: bool) -> None:
    by_file: defaultdict[Path, list[WeightSlice]] = defaultdict(list)
    for one in slices:
        by_file[stored[one.source].file].append(one)
    total = sum(_share_of(stored[one.source], one) for one in slices)
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, wanted in sorted(by_file.items()):
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for one in wanted:
                        part = _part(file.get_slice(stored[one.source].name), one)
                        copies.copy(one.target.narrow(one.dim, 0, one.length), part, one.source)
                        _pad(one)
                        bar.update(part.nbytes)
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path}: {error}") from None
            if (name := copies.damaged()) is not None:
                raise WeightsError(f"{path}: tensor {name!r} contains NaN or infinity; the file is damaged")


def _share_of(tensor: StoredTensor, wanted: WeightSlice) -> int:
    """Bytes of it that are read."""
    return tensor.num_bytes // max(1, wanted.num_members) * wanted.length // max(1, wanted.shape[wanted.dim])


def _part(source: Any, wanted: WeightSlice) -> Tensor:
    """Only the rows or columns that this rank wants leave the file.  source: a slice object of safetensors."""
    part = slice(wanted.start, wanted.start + wanted.length)
    place = (part,) if wanted.dim == 0 else (slice(None), part)
    read: Tensor = source[place if wanted.member is None else (wanted.member, *place)]
    return read


def _pad(wanted: WeightSlice) -> None:
    padding = wanted.target.shape[wanted.dim] - wanted.length
    wanted.target.narrow(wanted.dim, wanted.length, padding).zero_()


def _draw(slices: Iterable[WeightSlice], seed: int) -> None:
    for one in slices:
        name = one.source if one.member is None else f"{one.source}.{one.member}"
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(one.target.device).manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.empty(one.shape, device=one.target.device).normal_(0, DUMMY_SCALE, generator=generator)
        if len(one.shape) == 1 and one.source.endswith(".weight"):
            drawn += 1  # A norm's weight: around 0 it would silence its layer.
        one.target.narrow(one.dim, 0, one.length).copy_(drawn.narrow(one.dim, one.start, one.length))
        _pad(one)
