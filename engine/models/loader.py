"""Loading of a model's parameters from a checkpoint, tensor by tensor; each rank reads only its own part.

Owns: the order of reading, the checks that everything fits, the progress bar.
Does not know: what a layer computes, how a checkpoint is found.
"""

import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Literal

import msgspec
import torch
from tqdm import tqdm

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import DecoderShape, ExpertsShape, TokenScoreShape
from engine.checkpoints.shards import StoredTensor
from engine.formats.opening import open_reader
from engine.formats.reader import CODES, LOADABLE, WeightReader
from engine.host.memory import release_freed
from engine.kernels.choice import choose_kernels
from engine.layers.comm import Comm
from engine.layers.float8_experts import SCALES, scales_of
from engine.layers.kernels import LayerKernels
from engine.layers.packing import LinearKernel, Linears, RowKeeper
from engine.layers.weights import WeightSlice
from engine.models.model import Model, build_model
from engine.models.weight_copies import WeightCopies, copies_to
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

# Tables that older exports saved; they are computed here.
HARMLESS = re.compile(r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(bias|masked_bias))")
DUMMY_SCALE = 0.02
COMPARED_ROWS = 4096
BLOCK_BYTES = 1.5  # more than any element has in blocks, and less than a float of 16 bits
SAY_EVERY_S = 2.0


def load_model(
    spec: ModelSpec,
    comm: Comm,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["safetensors", "dummy"],
    seed: int,
    progress: bool,
    linears: Linears,
    check_room: Callable[[int], None] | None = None,
    kernels: LayerKernels | None = None,
    share: Callable[[float], None] | None = None,
    rounds_experts: bool = False,
) -> Model:
    """Build this rank's part of the model and fill it.

    load_format: 'dummy' draws every tensor from ``seed`` and its name, so the result is the same for all ranks and all
    numbers of ranks.
    progress: whether to show a bar on stderr.
    linears: kernels of the linear layers.
    check_room: called with the bytes that loading needs, after all names, shapes and files are checked and before
    memory is allocated; it raises an error if that is too much.
    kernels: fused kernels in place of the device's own.
    share: called with the share of the weights that is read.
    rounds_experts: whether experts in floats are rounded where the shape has them in float8; else all become floats.
    Raises WeightsError naming file and tensor; ConfigError if the ranks cannot share the model.
    """
    shape, reader, kernels = spec.shape, None, kernels or choose_kernels(device)
    with ExitStack() as opened:
        if load_format == "safetensors":
            reader, shape = _opened(spec, rounds_experts)
            opened.callback(reader.close)
            if shape.task_head is not None:
                shape = _with_stored_head(shape, reader)
            elif shape.tied and _has_own_head(shape, reader, dtype):
                what = "%s: tie_word_embeddings is true, but %s differs from %s: the LM head is not tied"
                log.warning(what, spec.directory, shape.names.head, shape.names.embedding)
                shape = msgspec.structs.replace(shape, tied=False)
        # On the meta device a model has shapes but no memory.
        plan = build_model(shape, comm, torch.device("meta"), dtype)
        if reader is not None:
            _check_names(spec, plan.slices(), reader.tensors)
        if check_room is not None:
            check_room(loading_bytes(plan, device, load_format, linears.layers, reader))
        try:
            model = build_model(shape, comm, device, dtype)
        except RuntimeError as error:  # torch raises it on every device when it cannot allocate
            needed = plan.parameter_bytes / 2**30
            raise WeightsError(f"{spec.directory}: its weights need {needed:.1f} GiB, too much for {device}") from error
        with torch.inference_mode():
            if reader is None:
                model.load(lambda slices: _draw(slices, seed), kernels, linears)
            else:
                filling = Filling(list(model.slices()), reader, copies_to(device), progress, comm.rank, share)
                filling.keep_rows(model, linears.layers)
                opened.callback(filling.close)
                model.load(filling.fill, kernels, linears)
                filling.log_progress()
    release_freed()
    return model


def loading_bytes(
    plan: Model,
    device: torch.device,
    load_format: Literal["safetensors", "dummy"],
    kernel: LinearKernel,
    reader: WeightReader | None = None,
) -> int:
    """Return the peak of device memory during loading.  plan: of one rank, on the meta device.

    Added to the parameters: one more copy of the largest tensor (drawn whole; or, read on a CPU, the rank's part while
    it is laid out), and on a CPU the table of a tied LM head, which is kept in both layouts.  A GPU's two buffers are
    small.  On a CPU memory is taken as it is written, and layers are laid out one by one, so all but the first take
    only the kernel's ``element_bytes`` per element.  reader: of the checkpoint, for a kernel that takes rows as
    they are stored."""
    on_cpu = device.type == "cpu"
    if on_cpu and isinstance(kernel, RowKeeper) and reader is not None:
        return _kept_bytes(plan, reader)
    largest = 0
    if load_format == "dummy":
        largest = max(math.prod(one.shape) for one in plan.slices())
    elif on_cpu:
        largest = max(math.prod(one.shape) * one.length // max(1, one.whole_length) for one in plan.slices())
    tied = plan.doubled_bytes if on_cpu else 0
    saved = 0
    if on_cpu:
        layers, _ = plan.linear_shapes()
        saved = int(
            sum(map(math.prod, layers[plan.linears_per_layer :])) * (plan.dtype.itemsize - kernel.element_bytes)
        )
    return plan.parameter_bytes + tied - saved + largest * torch.float32.itemsize


def _kept_bytes(plan: Model, reader: WeightReader) -> int:
    """Return the peak of memory on a CPU if matrices in blocks stay as they are stored.

    Added to what stays: one more copy of the largest tensor, and the table of a tied LM head that is not in blocks."""
    total = largest = 0
    tied = plan.doubled_bytes
    # Of the plan's memory, which has no addresses: other matrices, such as Gemma 4's inputs of layers, become floats.
    kept = {weight.untyped_storage()._cdata for weight in plan.kept_weights(with_embedding=True)}
    for index, one in enumerate(plan.slices()):
        stored = _stored_bytes(one, reader)
        in_blocks = one.target.untyped_storage()._cdata in kept and stored < BLOCK_BYTES * one.target.numel()
        total += stored if in_blocks else one.target.nbytes
        largest = max(largest, stored if in_blocks else one.target.numel() * torch.float32.itemsize)
        if index == 0 and in_blocks:  # the embedding
            tied = 0
    return total + tied + largest


def _check_names(spec: ModelSpec, slices: Iterable[WeightSlice], stored: Mapping[str, StoredTensor]) -> None:
    """Check that every tensor of the model is stored in the right shape and type, and that no stored one is unknown."""
    wanted = {one.source: (one.stored_shape, one.target.dtype) for one in slices}
    for name, (shape, dtype) in wanted.items():
        if name not in stored:
            raise WeightsError(f"{spec.directory}: tensor {name!r} of shape {list(shape)} is missing from the weights")
        tensor = stored[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, config.json expects {list(shape)}"
            )
        loadable = LOADABLE if dtype.is_floating_point else CODES
        if tensor.dtype not in loadable:
            raise WeightsError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}, expected one of {', '.join(loadable)}"
            )
    for name in sorted(stored.keys() - wanted.keys()):
        known = name == f"{spec.shape.names.head}.weight" or HARMLESS.fullmatch(name)
        if not known and not any(re.search(pattern, name) for pattern in spec.shape.unread):
            raise WeightsError(f"{stored[name].file}: tensor {name!r} has no place in {spec.architecture}")


def _opened(spec: ModelSpec, rounds_experts: bool) -> tuple[WeightReader, DecoderShape]:
    """Return the reader, and the shape with experts as they are read; all become floats if some are not in float8."""
    reader = open_reader(spec, rounds_experts)
    shape = _with_stored_experts(spec.shape, reader)
    if not any(one.float8 for one in shape.experts) or not (other := _not_in_float8(shape, reader.tensors)):
        return reader, shape
    what = "%s: experts are read as the floats that they stand for: %s is not in float8 with %s"
    log.warning(what, spec.directory, other, scales_of(other))
    reader.close()
    spec = msgspec.structs.replace(spec, shape=spec.shape.with_experts(float8=False))
    return open_reader(spec), shape.with_experts(float8=False)


def _not_in_float8(shape: DecoderShape, stored: Mapping[str, StoredTensor]) -> str:
    """Return the first weight of an expert that is stored in another way; '' for none."""
    for index, layer in enumerate(shape.layers):
        if isinstance(mlp := layer.mlp, ExpertsShape):
            prefix = f"{shape.names.layers}.{index}.{mlp.name}.experts"
            numbers = product(range(mlp.num_experts), (mlp.gate, mlp.up, mlp.down))
            for name in (f"{prefix}.{number}.{one}.weight" for number, one in numbers):
                if name in stored and (stored[name].dtype != "F8_E4M3" or scales_of(name) not in stored):
                    return name
    return ""


def _with_stored_head(shape: DecoderShape, reader: WeightReader) -> DecoderShape:
    """Return a tied model's shape, which scores tokens by a stored LM head if there is one, as in transformers 5."""
    head = shape.task_head
    if not isinstance(head, TokenScoreShape) or f"{shape.names.head}.weight" not in reader.tensors:
        return shape
    return msgspec.structs.replace(shape, task_head=msgspec.structs.replace(head, name=shape.names.head))


def _with_stored_experts(shape: DecoderShape, reader: WeightReader) -> DecoderShape:
    """Return the shape with experts in tensors of their own, where stacks were expected and the first one is missing.

    transformers 5 reads both, and writes single ones."""
    for index, layer in enumerate(shape.layers):
        mlp = layer.mlp
        if isinstance(mlp, ExpertsShape) and mlp.stacked and mlp.upright:
            prefix, tensors = f"{shape.names.layers}.{index}.{mlp.name}", reader.tensors
            single = [f"{prefix}.experts.0.{one}.weight" for one in (mlp.gate, mlp.up, mlp.down)]
            if f"{prefix}.{mlp.stacks[0]}" not in tensors and any(name in tensors for name in single):
                return shape.with_experts(stacked=False)
    return shape


def _has_own_head(shape: DecoderShape, reader: WeightReader, dtype: torch.dtype) -> bool:
    """Return whether a tied model's checkpoint has an LM head unlike the embedding; transformers 5 unties it.

    An equal one is common, and loading it would waste its memory."""
    table, own = f"{shape.names.embedding}.weight", f"{shape.names.head}.weight"
    stored = reader.tensors
    if table not in stored or own not in stored:
        return False
    expected = (shape.vocab_size, shape.hidden_size)
    if any(stored[name].shape != expected or stored[name].dtype not in LOADABLE for name in (table, own)):
        return True  # so that ``_check_names`` reports it
    for start in range(0, shape.vocab_size, COMPARED_ROWS):
        length = min(COMPARED_ROWS, shape.vocab_size - start)
        ours, theirs = (reader.part(name, 0, start, length).to(dtype) for name in (table, own))
        if not torch.equal(ours, theirs):
            return True
    return False


class Filling:
    """Fills slices from a reader, layer by layer, with a progress bar and log lines."""

    def __init__(
        self,
        slices: Sequence[WeightSlice],
        reader: WeightReader,
        copies: WeightCopies,
        progress: bool,
        rank: int,
        share: Callable[[float], None] | None = None,
    ) -> None:
        """Start the bar.  slices: all that will be read.  rank: number for the log.  share: as in ``load_model``."""
        self._share = share or (lambda share: None)
        self._reader = reader
        self._copies = copies
        self._rank = rank
        self._keeper: RowKeeper | None = None
        self._kept: set[int] = set()
        self._num_read, self._total = 0, sum(_stored_bytes(one, reader) for one in slices)
        self._began_at = time.monotonic()
        off = None if progress else True  # None: off without a terminal
        self._bar = tqdm(total=self._total, desc="loading weights", unit="B", unit_scale=True, disable=off)
        self.log_progress()

    def keep_rows(self, model: Model, kernel: LinearKernel) -> None:
        """Offer the rows of the model's weights to the kernel as they are stored."""
        if isinstance(kernel, RowKeeper):
            self._keeper = kernel
            weights = model.kept_weights(with_embedding=kernel.reads_rows)
            self._kept = {weight.untyped_storage().data_ptr() for weight in weights}

    def fill(self, slices: Iterable[WeightSlice]) -> None:
        """Read each slice into its target.  Raises WeightsError naming file and tensor."""
        release_freed()  # the plain weights of the layer before, which has another layout now
        for one in slices:
            if not one.length:
                continue
            if not self._takes(one):
                part = self._reader.part(one.source, one.dim, one.start, one.length, one.member)
                self._copies.copy(one.target.narrow(one.dim, 0, one.length), part, one.source)
                _pad(one)
            self._note(_stored_bytes(one, self._reader))
        if (name := self._copies.damaged()) is not None:
            path = self._reader.tensors[name].file
            raise WeightsError(f"{path}: tensor {name!r} contains NaN or infinity; the file is damaged")

    def _takes(self, one: WeightSlice) -> bool:
        """Return whether the kernel has taken the slice as it is stored."""
        whole = one.target.shape[one.dim] == one.length and one.target.stride(-1) == 1
        if self._keeper is None or one.target.untyped_storage().data_ptr() not in self._kept or not whole:
            return False
        rows = self._reader.rows(one.source, one.dim, one.start, one.length, one.member)
        return rows is not None and self._keeper.keep(one.target, rows)

    def log_progress(self) -> None:
        """Log the progress."""
        self._logged_at = time.monotonic()
        took_s = self._logged_at - self._began_at
        log.info(
            "rank %d: %.1f of %.1f MB of weights after %.1f s",
            self._rank,
            self._num_read / 1e6,
            self._total / 1e6,
            took_s,
        )

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def _note(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        self._bar.update(num_bytes)
        self._share(self._num_read / max(1, self._total))
        if time.monotonic() - self._logged_at >= SAY_EVERY_S:
            self.log_progress()


def _stored_bytes(one: WeightSlice, reader: WeightReader) -> int:
    num_bytes = reader.tensors[one.source].num_bytes // max(1, one.num_members)
    return num_bytes * one.length // max(1, one.whole_length)


def _pad(wanted: WeightSlice) -> None:
    padding = wanted.target.shape[wanted.dim] - wanted.length
    wanted.target.narrow(wanted.dim, wanted.length, padding).zero_()


def _draw(slices: Iterable[WeightSlice], seed: int) -> None:
    for one in slices:
        if not one.length:
            continue
        name = one.source if one.member is None else f"{one.source}.{one.member}"
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(one.target.device).manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.empty(one.shape or (1,), device=one.target.device).normal_(0, DUMMY_SCALE, generator=generator)
        if not one.target.is_floating_point():  # scales of 1/128; codes of all kinds
            drawn = drawn.mul_(5000 if len(one.shape) == 3 else 0).add_(120).remainder_(256)
        if one.source.endswith(SCALES):
            drawn.fill_(1)
        if len(one.shape) == 1 and one.source.endswith(".weight"):
            drawn += 1  # a norm's weight: around 0 it would silence its layer
        one.target.narrow(one.dim, 0, one.length).copy_(drawn.narrow(one.dim, one.start, one.length))
        _pad(one)
