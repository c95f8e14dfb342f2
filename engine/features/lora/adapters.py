"""A rank's adapters: files read into slots, and the steps whose rows read them.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted
Owns: which slot each row reads, what is in the slots, that other steps run as if there were no adapters.
Does not know: what the products compute, which slot an adapter gets, names.

A step of prompts with an adapter runs without graphs.  After attention its last layer computes only wanted rows, so the
products there get other rows.  Ranks agree on whether all could read an adapter, or they would sample apart.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load
from torch import Tensor

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import MatrixRows
from engine.execution.captured_steps import CapturedDecodes, CapturedModel, Decoded
from engine.features.lora.files import (
    NAME,
    Adapter,
    Placement,
    Product,
    digest_of,
    layer_products,
    module_scale,
    read_files,
    tensor_name,
)
from engine.features.lora.layers import AdaptedRows, AdaptedWeight
from engine.features.lora.reader import AdapterReader
from engine.kernels.choice import choose_kernels
from engine.layers.comm import Comm
from engine.layers.linear import ColumnLinear, Linear, QKVLinear, RowLinear
from engine.layers.packing import PackedWeight
from engine.layers.step import StepTensors
from engine.layers.upload import upload
from engine.messages import Step
from engine.models.decoder import Decoder
from engine.models.hybrid_layer import HybridLayer
from engine.models.model import Model
from engine.sampling.captured import SamplingVariant
from engine.types.errors import WeightsError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
PLACEMENTS = msgspec.msgpack.Decoder(list[Placement])


@dataclass(frozen=True, slots=True)
class _AdapterPlace:
    """A module's part of a product.

    matrix: index among the merged matrices.  rows: of the module.
    inputs: this rank's part of the module's.  outputs: this rank's part of ``rows``."""

    weight: AdaptedWeight
    matrix: int
    rows: MatrixRows
    inputs: slice
    outputs: slice

    def cut(self, a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
        """Return this part of the module's matrices, the second one transposed."""
        rows, groups = self.rows, b_OR.unflatten(0, (self.rows.groups, -1))
        b_CR = groups[:, rows.first : rows.first + rows.count // rows.groups].flatten(0, 1)
        return a_RI[:, self.inputs], b_CR[self.outputs].t()


ReadPart = tuple[_AdapterPlace, Tensor, Tensor]
"""A place of a module, and its part of the module's matrices, the second one scaled and transposed."""


class RankAdapters:
    """Slots for adapters next to the packed weights of a decoder.  num_slots: adapters at once.

    max_tokens: of a step.

    Raises MemoryError, or torch's error for it, if there is no room for the slots."""

    def __init__(
        self, decoder: Decoder, comm: Comm, num_slots: int, max_rank: int, max_rows: int, max_tokens: int
    ) -> None:
        self._comm = comm
        self._names = decoder.shape.names
        self._dtype = decoder.dtype
        self._device = decoder.device
        self._slot_of_row = np.zeros(max_rows, dtype=np.int64)
        self._num_slots = num_slots
        # Rows that are verified have several tokens in a captured step.
        self._sent_M = torch.full((max(max_rows, max_tokens),), -1, dtype=torch.int64, device=decoder.device)
        self._sent = b""
        self._lost: dict[int, str] = {}
        self.reader = AdapterReader(self._read, comm.rank)
        self._slots_T: Int64 | None = None
        by_kernels = choose_kernels(decoder.device) is not None
        self._rows, self._last_rows = AdaptedRows(by_kernels=by_kernels), AdaptedRows(by_kernels=by_kernels)
        self._weights: list[AdaptedWeight] = []
        self._places: defaultdict[str, list[_AdapterPlace]] = defaultdict(list)
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            recurrent = layer.recurrent if isinstance(layer, HybridLayer) else None
            parts = (layer.attention, recurrent, layer.mlp)
            for part, products in zip(parts, layer_products(decoder.shape, index), strict=True):
                if part is None:
                    continue
                for linear, product in zip(part.linears, products, strict=bool(products)):
                    # Behind the first half the last layer computes wanted rows only.
                    is_last = index == last and (part is layer.mlp or linear is part.linears[-1])
                    self._adapt(linear, product, self._last_rows if is_last else self._rows, num_slots, max_rank)

    def _adapt(self, linear: Linear, product: Product, rows: AdaptedRows, num_slots: int, max_rank: int) -> None:
        whole = slice(0, product.inputs)
        if isinstance(linear, RowLinear):
            mine = product.inputs // self._comm.size
            whole = slice(self._comm.rank * mine, (self._comm.rank + 1) * mine)
            outputs = [slice(0, rows.count) for rows in product.rows]
        else:
            assert isinstance(linear, ColumnLinear | QKVLinear), f"{type(linear).__name__} takes no adapter"
            outputs = [slice(start, start + length) for _, start, length in linear.parts]
        built: list[AdaptedWeight] = []

        def around(plain: PackedWeight) -> PackedWeight:
            sizes = [one.stop - one.start for one in outputs]
            inputs = whole.stop - whole.start
            built.append(AdaptedWeight(plain, rows, inputs, sizes, num_slots, max_rank, self._device, self._dtype))
            return built[0]

        linear.adapt(around)
        self._weights += built
        for matrix, (one, part) in enumerate(zip(product.rows, outputs, strict=True)):
            self._places[one.name].append(_AdapterPlace(built[0], matrix, one, whole, part))

    # ---- steps ------------------------------------------------------------------------------

    @torch.inference_mode()
    def take(self, step: Step) -> dict[int, str]:
        """Fill the slots that the step's part names, and note the slots of its rows.

        Return row -> reason, for rows of the step whose adapter could not be read."""
        for admission in step.admissions:
            self._slot_of_row[admission.row] = 0
        if (part := step.parts.get(NAME)) is not None:
            for one in PLACEMENTS.decode(part):
                self._slot_of_row[one.row] = one.slot
                if one.adapter is not None:
                    self._fill(one.slot, one.adapter, is_read=one.is_read)
        rows = np.frombuffer(step.decode_rows, dtype=np.int32)
        lengths = np.ones(len(rows), dtype=np.int64)
        if step.prefill_rows:
            rows = np.concatenate((rows, np.frombuffer(step.prefill_rows, dtype=np.int32)))
            lengths = np.concatenate((lengths, np.frombuffer(step.prefill_lengths, dtype=np.int32)))
        slots = self._slot_of_row[rows]
        self._slots_T = np.repeat(slots, lengths) if slots.any() else None
        if not self._lost:
            return {}
        lost = self._lost
        return {row: lost[slot] for row, slot in zip(rows.tolist(), slots.tolist(), strict=True) if slot in lost}

    @property
    def nbytes(self) -> int:
        """Number of bytes of all slots."""
        return sum(weight.slot_bytes for weight in self._weights)

    @property
    def in_step(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self._slots_T is not None

    def begin(self, wanted_N: Tensor | None) -> None:
        """Set the adapters for the products of a step.  wanted_N: rows of T that the last layer needs; None for all."""
        slots_T = self._slots_T
        assert slots_T is not None, "the step has no adapters"
        used = slots_T[slots_T > 0]
        first, end = int(used.min()) - 1, int(used.max())
        (on_device_T,) = upload((slots_T - 1,), self._device)
        self._rows.set(on_device_T, first, end, self._dtype)
        self._last_rows.set(on_device_T if wanted_N is None else on_device_T[wanted_N], first, end, self._dtype)

    def begin_captured(self, num_rows: int) -> None:
        """Set the adapters for a step that is captured: those that ``send`` will have sent."""
        slots_B = self._sent_M[:num_rows]
        for rows in (self._rows, self._last_rows):
            rows.set(slots_B, 0, self._num_slots, self._dtype)

    def send(self) -> None:
        """Send the slots of the step's rows to where captured steps read them, unless they are there."""
        assert self._slots_T is not None, "the step has no adapters"
        slots_M = np.full(len(self._sent_M), -1)
        slots_M[: len(self._slots_T)] = self._slots_T - 1
        if (key := slots_M.tobytes()) != self._sent:
            self._sent_M.copy_(upload((slots_M,), self._device)[0])
            self._sent = key

    def end(self) -> None:
        """Clear the adapters: no product adds one until the next ``begin``."""
        self._rows.clear()
        self._last_rows.clear()

    # ---- files ------------------------------------------------------------------------------

    def _fill(self, slot: int, adapter: Adapter, *, is_read: bool) -> None:
        """Put an adapter into a slot.  is_read: all ranks have it, and so none can fail."""
        self._lost.pop(slot, None)
        if is_read:
            self._put(slot - 1, self.reader.take(adapter))
            return
        found, reason = self.reader.read(adapter)
        self._put(slot - 1, found or [])
        if self._comm.size > 1:
            all_fine = self._comm.all_gather(torch.tensor([not reason], dtype=torch.float32, device=self._device), 0)
            if not reason and all_fine.min() == 0:
                reason = "the adapter of this request can no longer be read by another rank, whose log has the details"
        if reason:
            self._lost[slot] = reason

    def _put(self, slot: int, parts: list[ReadPart]) -> None:
        for weight in self._weights:
            weight.empty(slot)
        for place, a_RI, b_RO in parts:
            place.weight.put(slot, place.matrix, a_RI, b_RO)

    @torch.inference_mode()
    def _read(self, adapter: Adapter) -> list[ReadPart]:
        """Return an adapter's matrices and their places; called on any thread.  Raises WeightsError."""
        config, stored = read_files(Path(adapter.path))
        if digest_of(config, stored) != adapter.digest:
            raise WeightsError(f"{adapter.path}: its files have changed; load it again")
        parts: list[ReadPart] = []
        fields, tensors = Fields(json.loads(config), adapter.path), load(stored)
        for own, places in self._places.items():
            named = (one for one in self._names.spellings(own) if tensor_name(one, "A") in tensors)
            if (name := next(named, None)) is None:
                continue
            a_RI = tensors[tensor_name(name, "A")]
            b_OR = tensors[tensor_name(name, "B")].float() * module_scale(fields, name, len(a_RI))
            a_RI, b_OR = a_RI.to(self._dtype), b_OR.to(self._dtype)
            # The mask multiplies other rows' results by zero, which makes NaN of numbers that are not finite.
            if not (a_RI.isfinite().all() and b_OR.isfinite().all()):
                raise WeightsError(f"{adapter.path}: {name} has numbers that are not finite in {self._dtype}")
            for place in places:
                cut = place.cut(a_RI, b_OR)
                if self._device.type == "cuda":
                    cut = cut[0].contiguous().pin_memory(), cut[1].contiguous().pin_memory()
                parts.append((place, *cut))
        return parts


class AdaptedModel:
    """A model whose products add the adapters.  usual: runs steps without any; other attributes are those of usual."""

    def __init__(self, plain: Decoder, usual: Model | CapturedModel, adapters: RankAdapters) -> None:
        self._plain = plain
        self._usual = usual
        self._adapters = adapters
        self._of_models = usual if isinstance(usual, PiecesOfModels) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def forward(self, step: StepTensors) -> Tensor:
        """Return logits_NV."""
        if not self._adapters.in_step:
            return self._usual.forward(step)
        return self._plain.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor) -> Tensor:
        """Return x of the wanted rows."""
        if not self._adapters.in_step:
            return self._usual.hidden(step, wanted_N)
        if self._of_models is not None and self._of_models.has(len(step.token_ids_T), NAME):
            self._adapters.send()
            return self._of_models.hidden(step, wanted_N, NAME)
        self._adapters.begin(wanted_N)
        try:
            return self._plain.hidden(step, wanted_N)
        finally:
            self._adapters.end()


@runtime_checkable
class PiecesOfModels(Protocol):
    """Captured pieces of several models, by name."""

    def has(self, num_tokens: int, model: str) -> bool:
        """Return whether there is a graph for so many tokens with one of the models."""
        ...

    def hidden(self, step: StepTensors, wanted_N: Tensor, model: str = "") -> Tensor:
        """Return x of the wanted rows by one of the models."""
        ...


class CapturedAdapters:
    """The model with adapters, as it is captured: a replay reads which row has which from the device."""

    def __init__(self, plain: Decoder, adapters: RankAdapters) -> None:
        self._plain = plain
        self._adapters = adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def hidden(self, step: StepTensors) -> Tensor:
        """Return x of all rows."""
        self._adapters.begin_captured(len(step.token_ids_T))
        try:
            return self._plain.hidden(step)
        finally:
            self._adapters.end()


@runtime_checkable
class DecodesOfModels(Protocol):
    """Captured decode steps of several models, by name."""

    models: Mapping[str, Model]

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant, model: str = "") -> Decoded:
        """Queue a step (``CapturedDecodes.launch``) of one of the models."""
        ...


class AdaptedDecodes:
    """Captured decode steps, with an adapter if that was captured; other attributes are those of the captured steps."""

    def __init__(self, captured: CapturedDecodes, adapters: RankAdapters) -> None:
        self._captured = captured
        self._adapters = adapters
        several = isinstance(captured, DecodesOfModels) and NAME in captured.models
        self._of_models = cast("DecodesOfModels", captured) if several else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a captured step for so many rows, with their adapters if they have any."""
        return (self._of_models is not None or not self._adapters.in_step) and self._captured.fits(num_rows)

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        """Queue the step (``CapturedDecodes.launch``)."""
        if self._of_models is None or not self._adapters.in_step:
            return self._captured.launch(rows_N, lengths_N, variant)
        self._adapters.send()
        return self._of_models.launch(rows_N, lengths_N, variant, NAME)
