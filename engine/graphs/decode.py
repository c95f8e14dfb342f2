"""Decode steps as two graphs each: one up to the logits, and one that samples and writes the tokens back.

    step of n rows -> size B >= n, variant by the rows' sampling -> (one packed copy, if anything changed) -> replay

All variants of a size share its first graph, which is by far the larger one.

A step needs nothing from the host: rows' lengths are on the device and advance inside the graph, which reads each row's
last token, pages and states where they are kept, and writes the new ones there.  The host sends only the scheduler's
changes: the rows of the step, their sampling parameters and new pages, in one copy, and only after a change.  Tokens
are copied back into page-locked memory without waiting, so the next step can be queued after this one.  Rows that pad a
batch read and write the pool's dump page, and a slot of states that is no row's.

A step that verifies proposed tokens is such a step, too: each token of a row has a place, with the row's pages and a
length of its own.  All keys and values of a layer are stored before its attention, so a place reads those of the
places before it.  The host sends the positions then.

Legend: M rows of the largest graph · B rows of a graph, padding included · N real rows · W pages of the batch's table
Owns: static inputs, which graph serves a step, what is copied.  Does not know: how captures are done, the scheduler.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.captured_steps import Decoded, token_places
from engine.execution.rows import DeviceRows
from engine.graphs.breakable import GraphRecording, SegmentRecorder
from engine.graphs.capturing import Capturing, round_up
from engine.graphs.decode_attention import DecodeAttention
from engine.graphs.device import GraphDevice
from engine.graphs.inputs import choose_inputs, first_rows, static_inputs
from engine.graphs.pinned_ring import PinnedReceiver, PinnedRing
from engine.layers.attention import AttentionBackend, BeginningAttention
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates, StatesOfDecodes
from engine.layers.step import DecodeInputs, StepTensors
from engine.messages import Step
from engine.models.model import Model
from engine.sampling.captured import (
    NO_ROW,
    CapturedSampler,
    SamplingVariant,
    array_columns,
    columns_bytes,
    tensor_columns,
)
from engine.sampling.sampler import Sampler

DECODES = "decode steps"
OWN_LENGTH = -1  # in place of a position: the length that the device has of the row
NUM_BUFFERS = 4  # on the host: one more than the 2 steps in flight and the step that is launched

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class DecodeGraphs:
    """Captured decode steps.  sizes: numbers of rows, ascending.  Choices depend on steps alone, so ranks agree.

    verifies: as in ``CapturedDecodes``; states advance by one token of a row in a step."""

    def __init__(
        self,
        *,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        rows: DeviceRows,
        sampler: Sampler,
        states: RecurrentStates | None = None,
        device: GraphDevice,
        recorder: SegmentRecorder,
        capturing: Capturing,
        sizes: Sequence[int],
        others: Mapping[str, Model] | None = None,
    ) -> None:
        """Allocate static inputs.  attention: a backend for which ``can_capture`` is true.

        states: of recurrent layers, with a slot for padding after those of all rows.
        others: models beside ``model`` that a step may be launched with, by name."""
        self.sizes = tuple(sizes)
        self.models = {"": model, **(others or {})}
        self.verifies = states is None
        self._pool = pool
        self._rows = rows
        self._states = states
        self._device = device
        self._recorder = recorder
        self._capturing = capturing
        self._input_ops = choose_inputs(pool.data.device)
        self._lengths_R = rows.keep_lengths()
        largest = self.sizes[-1]
        # Two blocks: the columns of the batch and its positions, then space for one new page per row.
        self._batch_end = columns_bytes(largest) + largest * 8
        self._packed = device.buffer((self._batch_end + largest * (8 + 4),), torch.uint8)
        self._columns = tensor_columns(self._packed[: columns_bytes(largest)], largest)
        self._columns.rows.fill_(NO_ROW)
        self._given_M = self._packed[columns_bytes(largest) : self._batch_end].view(torch.int64).fill_(OWN_LENGTH)
        self._append_places_M, self._append_pages_M = _appends_of(self._packed[self._batch_end :], largest)
        self._sampler: CapturedSampler = sampler.captured(self._columns)
        self._tokens_M = device.buffer((largest,), torch.int64)
        self._all_rows_M = device.buffer((largest,), torch.int64)
        self._all_rows_M.copy_(torch.arange(largest))
        self._starts_M1 = device.buffer((largest + 1,), torch.int32)
        self._starts_M1.copy_(torch.arange(largest + 1))
        self._inputs = static_inputs(device, largest, rows.pages_RP.shape[1])
        self._attention = DecodeAttention(attention, self._inputs, self.sizes)
        self._outgoing = PinnedRing(device, NUM_BUFFERS, self._packed.nbytes)
        self._incoming = PinnedReceiver(device, self._tokens_M.nbytes)
        self._recordings: dict[tuple[int, str], GraphRecording] = {}
        self._sent: tuple[int, bytes, bytes] | None = None
        self._sent_batch = np.empty(0, dtype=np.uint8)
        self._decided: tuple[tuple[int, bytes], SamplingVariant] | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """Captured sizes, ascending."""
        return tuple(sorted({size for size, _ in self._recordings}))

    @property
    def _advice(self) -> str:
        return (
            f"lower graphs.max_rows (now {self.sizes[-1]}), scheduler.max_running or kv.memory_fraction, turn off "
            "graphs of steps with prefill with graphs.mode=decode, or all graphs with graphs.mode=off"
        )

    def capture(self, progress: bool = False) -> None:
        """Capture all sizes in all variants.

        Raises GraphError, on every rank if one fails; then no graph remains.
        """
        self._capturing.capture(
            DECODES,
            self.sizes,
            self._warm_up,
            self._record,
            self._recordings.clear,
            advice=self._advice,
            progress=progress,
        )

    def measure(self) -> int:
        """Return the bytes that all captures will take; no graph remains.  Raises GraphError."""
        return self._capturing.measure(
            self.sizes, self._warm_up, self._record, self._recordings.clear, advice=self._advice
        )

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for so many rows."""
        size = round_up(self.sizes, num_rows) if num_rows else None
        return size is not None and (size, "") in self._recordings

    def variant_of(self, rows_N: Int64, positions_N: Int64) -> SamplingVariant:
        """Return how a step of these rows will be sampled.  positions_N: of the sampled tokens."""
        key = (self._sampler.version, rows_N.tobytes())
        if self._decided is not None and self._decided[0] == key:
            return self._decided[1]
        variant = self._sampler.variant_of(rows_N, positions_N)
        # Stop tokens are suppressed only for a while, so rows that are sampled elsewhere are checked in each step.
        self._decided = None if variant is SamplingVariant.LOGITS else (key, variant)
        return variant

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant, model: str = "") -> Decoded:
        """Queue the step of the last ``tell``, for rows that ``fits``.

        rows_N: the row of each of its tokens.  lengths_N: their lengths, the new token included.  model: name of
        another one."""
        num = len(rows_N)
        size = round_up(self.sizes, num)
        assert size is not None, f"{num} rows, captured up to {self.sizes[-1]}"
        self._recorder.num_tokens = num
        self._attention.plan(size, lengths_N)
        result = self._recordings[size, model].replay(variant)
        write_at_N = self._inputs.write_at_B[:num]
        if variant is SamplingVariant.LOGITS:
            return Decoded(None, None, result[:num], write_at_N)
        token_ids_N, event = self._incoming.receive(self._tokens_M[:num])
        return Decoded(token_ids_N, event, None, write_at_N)

    def apply(self, step: Step) -> None:
        """Send the changes since the last step, new pages included: one copy, or none if nothing has changed."""
        rows_N, given_N = token_places(step)
        first = self._packed.nbytes
        end = num_appends = 0
        key = (self._sampler.version, rows_N.tobytes(), given_N.tobytes())
        buffer = None
        if key != self._sent:
            batch = np.empty(self._batch_end, dtype=np.uint8)
            given_M = batch[-self.sizes[-1] * 8 :].view(np.int64)
            self._sampler.fill(array_columns(batch[: -given_M.nbytes], self.sizes[-1]), rows_N)
            given_M[: len(rows_N)], given_M[len(rows_N) :] = given_N, OWN_LENGTH
            self._sent = key
            if not np.array_equal(batch, self._sent_batch):  # equal if a row outside of this batch was admitted
                self._sent_batch = batch
                buffer = self._outgoing.take()
                buffer.data[: self._batch_end].numpy()[:] = batch
                first, end = 0, self._batch_end
        if step.table_rows:
            places_A, pages_A = self._rows.appends(step)
            num_appends = len(pages_A)
            if num_appends > self.sizes[-1]:
                # A row that is verified may get several pages of few tokens.
                self._rows.apply(step)
                num_appends = 0
            else:
                buffer = buffer or self._outgoing.take()
                places, pages = _appends_of(buffer.data[self._batch_end :], self.sizes[-1])
                places.numpy()[:num_appends] = places_A
                pages.numpy()[:num_appends] = pages_A
                first, end = min(first, self._batch_end), self._packed.nbytes
        if buffer is None:
            return
        self._device.copy(self._packed[first:end], buffer.data[first:end])
        buffer.event.record()
        if num_appends:
            pages_flat = self._rows.pages_RP.view(-1)
            pages_flat.index_copy_(0, self._append_places_M[:num_appends], self._append_pages_M[:num_appends])

    def _warm_up(self, size: int) -> None:
        attention = self._attention.prepare(size)
        for model in self.models.values():
            self._run(model, size, attention)

    def _record(self, size: int) -> None:
        attention = self._attention.prepare(size)
        for name, model in self.models.items():
            self._recordings[size, name] = self._recorder.record(size, partial(self._run, model, size, attention))

    def _run(self, model: Model, size: int, attention: AttentionBackend) -> Tensor:
        """Run one step of the rows that the columns name, and sample it in each way.  Return the logits."""
        self._recorder.num_tokens = size
        inputs = self._fill(size)
        logits_BV = self._logits(model, size, inputs, attention)
        for variant in SamplingVariant:
            if variant is not SamplingVariant.LOGITS:
                self._recorder.branch(variant, partial(self._sample, variant, inputs, logits_BV))
        return logits_BV

    def _fill(self, size: int) -> DecodeInputs:
        """Write the inputs of the step where they are kept, and return them."""
        rows, inputs = self._rows, first_rows(self._inputs, size)
        self._input_ops.fill(
            self._columns.rows[:size],
            self._given_M[:size],
            rows.tokens_RM,
            rows.pages_RP,
            self._lengths_R,
            self._pool.page_size,
            self._pool.dump_page,
            inputs,
            self._pool.page_stride,
        )
        return inputs

    def _logits(self, model: Model, size: int, inputs: DecodeInputs, attention: AttentionBackend) -> Tensor:
        if isinstance(attention, BeginningAttention):
            attention.begin_step()
        states = None
        if self._states is not None:
            states = StatesOfDecodes(self._states, self._columns.rows[:size], self._starts_M1[: size + 1])
        step = StepTensors(
            token_ids_T=inputs.token_ids_B,
            positions_T=inputs.positions_B,
            slots_T=inputs.slots_B,
            sample_at_N=self._all_rows_M[:size],
            attention=attention,
            pool=self._pool,
            states=states,
        )
        return model.logits(model.hidden(step))

    def _sample(self, variant: SamplingVariant, inputs: DecodeInputs, logits_BV: Tensor) -> None:
        """Pick a token of each row, and write it where the next step and the host read it."""
        token_ids_B = self._sampler.pick(variant, logits_BV, inputs.positions_B + 1)
        self._input_ops.write(inputs.write_at_B, token_ids_B, self._rows.tokens_RM)
        self._tokens_M[: len(token_ids_B)].copy_(token_ids_B)


def _appends_of(packed: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return views of a uint8 tensor: places, int64, and pages, int32."""
    return packed[: num_rows * 8].view(torch.int64), packed[num_rows * 8 :].view(torch.int32)
