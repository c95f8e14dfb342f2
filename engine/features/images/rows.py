"""The pictures of a rank's rows: which rows of a step's input come from an encoder, and the positions of its tokens.

Legend: T new tokens in the step (ragged, packed) · K of them that are places of pictures · D model dim
        L layers that get rows, 1 and those of ``num_deep``
Owns: the encoded pictures, which places of a step each fills.  Does not know: encoders, models, messages to a rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.rows import DeviceRows
from engine.features.images.messages import RowPicture, pictures_of
from engine.features.images.positions import RowPositions
from engine.features.images.whole import WholeAttention, WholePicture
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.layers.upload import upload
from engine.messages import Admission, Step
from engine.plugins.encoder.encoder import Encoder
from engine.text.pictures import FIRST_ID, runs_of

Int32 = npt.NDArray[np.int32]


class _Segment(NamedTuple):
    """Tokens of one row in a step: from place ``at`` of the step on, position ``start`` of the row."""

    row: int
    at: int
    start: int
    length: int


class StepPictures:
    """The rows of a step's pictures; ``Inserts`` of ``StepTensors``.  at_K: places in T.  rows_LKD: of these."""

    def __init__(self, at_K: Tensor, rows_LKD: Tensor) -> None:
        self._at_K = at_K
        self._rows_LKD = rows_LKD

    def embed(self, x_TD: Tensor) -> Tensor:
        return x_TD.index_copy_(0, self._at_K, self._rows_LKD[0])

    def behind(self, layer: int, update_TD: Tensor) -> Tensor:
        if layer + 1 < len(self._rows_LKD):
            update_TD = update_TD.sum(1) if update_TD.dim() == 3 else update_TD
            update_TD = update_TD.index_add(0, self._at_K, self._rows_LKD[layer + 1])
        return update_TD


class PictureRows:
    """The pictures of one rank's rows.  token_id: the model's own token at their places.

    rows: of the device.  spec: the model's attention.  form: of the pictures.
    encoded: key -> rows_LND, on the device."""

    def __init__(
        self, token_id: int, rows: DeviceRows, spec: AttentionSpec, form: Encoder, device: torch.device
    ) -> None:
        self.encoded: dict[str, Tensor] = {}
        self._token_id = token_id
        self._rows = rows
        self._spec = spec
        self._has_axes = form.axes is not None
        self._whole = form.whole
        self._device = device
        self._pictures: dict[int, tuple[RowPicture, ...]] = {}
        self._positions: dict[int, RowPositions] = {}
        self._segments: list[_Segment] = []

    def take(self, step: Step) -> Step:
        """Take in a step.  Return it with the model's token at places of pictures."""
        pictures = pictures_of(step)
        for one in step.admissions:
            self._pictures.pop(one.row, None)
            self._positions.pop(one.row, None)
        for row, mine in pictures.items():
            self._pictures[row] = mine
        if pictures:
            step = msgspec.structs.replace(step, admissions=tuple(map(self._admitted, step.admissions)))
        self._segments = list(self._segments_of(step)) if self._pictures else []
        return step

    def _segments_of(self, step: Step) -> Iterator[_Segment]:
        """Yield the segments of a step that differ from those of a text."""
        decodes = np.frombuffer(step.decode_rows, dtype=np.int32)
        if self._has_axes:
            for at, row in enumerate(decodes.tolist()):
                if row in self._positions:
                    yield _Segment(row, at, int(self._rows.computed[row]), 1)
        columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths)
        at = len(decodes)
        for row, start, length in zip(*(np.frombuffer(one, dtype=np.int32).tolist() for one in columns), strict=True):
            mine = self._pictures.get(row, ())
            if (self._has_axes and mine) or any(one.overlaps(start, start + length) for one in mine):
                yield _Segment(row, at, start, length)
            at += length

    def _admitted(self, admission: Admission) -> Admission:
        if (mine := self._pictures.get(admission.row)) is None:
            return admission
        token_ids = np.frombuffer(admission.token_ids, dtype=np.int32)
        if self._has_axes:
            self._positions[admission.row] = RowPositions(admission.num_prompt_tokens, mine)
        own = np.where(token_ids >= FIRST_ID, np.int32(self._token_id), token_ids)
        return msgspec.structs.replace(admission, token_ids=own.tobytes())

    @property
    def in_step(self) -> bool:
        """Whether the step differs from one of text."""
        return bool(self._segments)

    def put_into(self, step: StepTensors) -> StepTensors:
        """Return the tensors of a step with its pictures."""
        if self._has_axes:
            step = replace(step, positions_T=self._positions_3T(step))
        at, rows = [], []
        for segment in self._segments:
            end = segment.start + segment.length
            for one in self._pictures[segment.row]:
                places = one.places_n
                first, last = np.searchsorted(places, (segment.start, end)).tolist()
                if first < last:
                    at.append(places[first:last].astype(np.int64) - segment.start + segment.at)
                    rows.append(self.encoded[one.key][:, first:last])
        if not at:
            return step
        if self._whole:
            step = replace(step, attention=self._attending_to_all(step))
        (at_K,) = upload((np.concatenate(at),), self._device)
        return replace(step, inserts=StepPictures(at_K, torch.cat(rows, dim=1)))

    def _attending_to_all(self, step: StepTensors) -> WholeAttention:
        """Return the attention of a step with pictures that see all of themselves."""
        found = []
        for segment in self._segments:
            for one in self._pictures[segment.row]:
                for begin, end in runs_of(one.places_n):
                    start = max(segment.start, begin)
                    if start >= min(end, segment.start + segment.length):
                        continue
                    if end > segment.start + segment.length:
                        raise RuntimeError("a step has a part of a picture that must be computed at once")
                    first = segment.at + start - segment.start
                    slots_L = self._slots(segment.row, end, step.pool)
                    found.append(WholePicture(first, first + end - start, start, slots_L))
        return WholeAttention(step.attention, self._spec, step.pool, found, in_windows=self._whole == "windows")

    def _slots(self, row: int, length: int, pool: KVPool) -> Tensor:
        """Return the slots of a row's first tokens."""
        num_pages = -(-length // pool.page_size)
        pages_P1 = self._rows.pages_RP[row, :num_pages].to(torch.int64)[:, None]
        offsets_S = torch.arange(pool.page_size, device=pages_P1.device)
        return (pages_P1 * pool.page_stride + offsets_S).flatten()[:length]

    def _positions_3T(self, step: StepTensors) -> Tensor:
        """Return positions on all axes: of a text's tokens, the same on each."""
        at, found = [], []
        for segment in self._segments:
            at.append(np.arange(segment.at, segment.at + segment.length))
            found.append(self._positions[segment.row].positions(segment.start, segment.length))
        at_k, *axes = upload((np.concatenate(at), *np.concatenate(found, axis=1)), self._device)
        positions_3T = step.positions_T.expand(3, -1).clone()
        return positions_3T.index_copy_(1, at_k, torch.stack(axes))
