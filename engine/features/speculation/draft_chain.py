"""The passes that draft for a batch of rows as one graph: the first reads what the draft lacks, the others decode.

Legend: M rows of the largest graph · B rows of a graph, padding included · W places of a row in the first pass
        K passes · N rows that are sampled in a pass
Owns: the static inputs of the passes, one graph for each number of rows.  Does not know: how a token is guessed.

A token of the first pass has a place of its own, as in a step that verifies, so rows that lack at most W tokens fit.
The host sends where each row ends and how much the draft lacks of it, by one copy, or leaves both to the counts on the
device; the graph makes the positions of all passes of that.  A row that gets fewer tokens than others is padding in the
later passes.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.batch import Int32
from engine.features.speculation.counted_tokens import RowCounts
from engine.graphs.breakable import GraphRecording
from engine.graphs.capturing import round_up
from engine.graphs.decode_attention import DecodeAttention
from engine.graphs.inputs import choose_inputs, first_rows, static_inputs
from engine.graphs.pinned_ring import PinnedRing
from engine.graphs.rank import CaptureKit
from engine.layers.attention import AttentionBackend
from engine.layers.kv_pool import KVPool
from engine.layers.step import DecodeInputs, StepTensors

CHAINS = "drafts"
ADVICE = "lower graphs.max_rows or scheduler.max_running, or turn off all graphs with graphs.mode=off"
NUM_BUFFERS = 4  # on the host: one more than the steps in flight and the step that is launched
NO_ROW = -1

Guess = Callable[[StepTensors, Tensor, Tensor], Tensor]
"""Runs a pass: its tensors, and of each sampled token row and position.  Returns the tokens."""


class DraftChain:
    """The captured passes.

    width: W.  depth: K.  ahead: as in ``DeviceRows.for_pool``.
    attentions: two backends over ``pool``, for the first pass and for the others; graphs may hold both."""

    def __init__(
        self,
        kit: CaptureKit,
        guess: Guess,
        pool: KVPool,
        attentions: tuple[AttentionBackend, AttentionBackend],
        tokens_RM: Tensor,
        pages_RP: Tensor,
        counts: RowCounts,
        *,
        width: int,
        depth: int,
        ahead: int,
    ) -> None:
        self.width = width
        self._kit = kit
        self._guess = guess
        self._pool = pool
        self._tokens_RM, self._pages_RP = tokens_RM, pages_RP
        self._depth, self._ahead = depth, ahead
        device, most = kit.device, kit.sizes[-1]
        self._ops = choose_inputs(pool.data.device)
        self._counts = counts
        self._lengths_R = device.buffer((len(tokens_RM),), torch.int32)  # never read: all positions are given
        # Of each row: its number, where it ends, tokens that it lacks, and tokens to draft.
        self._asked = device.buffer((4, most), torch.int64)
        self._asked[0] = NO_ROW
        self._nth_W = device.buffer((width,), torch.int64).copy_(torch.arange(-width, 0))
        self._nth_L = device.buffer((depth - 1, 1), torch.int64).copy_(torch.arange(1, depth)[:, None])
        # Rows and positions of each pass: those of the first one have W places for each row.
        self._packed = device.buffer((2, most * (width + depth - 1)), torch.int64)
        self._packed[0] = NO_ROW
        self._first, self._later = (static_inputs(device, num, pages_RP.shape[1]) for num in (most * width, most))
        sizes = kit.sizes
        self._attends = (
            DecodeAttention(attentions[0], self._first, [size * width for size in sizes]),
            DecodeAttention(attentions[1], self._later, sizes),
        )
        self._last_M = device.buffer((most,), torch.int64).copy_(torch.arange(width - 1, most * width, width))
        self._all_M = device.buffer((most,), torch.int64).copy_(torch.arange(most))
        self._outgoing = PinnedRing(device, NUM_BUFFERS, self._asked.nbytes)
        self._recordings: dict[int, GraphRecording] = {}

    def capture(self, progress: bool = False) -> None:
        """Capture all sizes.  Raises GraphError, on every rank if one fails; then no graph remains."""
        self._kit.capturing.capture(
            CHAINS,
            self._kit.sizes,
            self._run,
            self._record,
            self._recordings.clear,
            advice=ADVICE,
            progress=progress,
        )

    def measure(self) -> int:
        """Return the bytes that all captures will take; no graph remains.  Raises GraphError."""
        return self._kit.capturing.measure(
            self._kit.sizes, self._run, self._record, self._recordings.clear, advice=ADVICE
        )

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a graph for so many rows."""
        return round_up(self._kit.sizes, num_rows) in self._recordings

    def replay(self, rows_B: Int32, ends_B: Int32, lacking_B: Int32, counts_B: npt.NDArray[np.int64]) -> None:
        """Draft for rows that ``fits``: ``counts`` tokens from ``ends`` on, of which ``lacking`` are read before.

        Where these are ``BY_DEVICE``, the counts on the device have both."""
        size, num = round_up(self._kit.sizes, len(rows_B)), len(rows_B)
        assert size is not None, f"{num} rows, captured up to {self._kit.sizes[-1]}"
        buffer = self._outgoing.take()
        asked = buffer.data.view(torch.int64).view(4, -1).numpy()
        asked[0] = NO_ROW
        asked[:, :num] = rows_B, ends_B, lacking_B, counts_B
        self._kit.device.copy(self._asked.view(torch.uint8).view(-1), buffer.data)
        buffer.event.record()
        self._kit.recorder.num_tokens = num
        self._recordings[size].replay()

    def _place(self, nth: int) -> int:
        """Return where the columns of a pass but the first begin."""
        return self._kit.sizes[-1] * (self.width + nth - 1)

    def _record(self, size: int) -> None:
        self._recordings[size] = self._kit.recorder.record(size, lambda: self._run(size))

    def _run(self, size: int) -> Tensor:
        """Run all passes for the rows that the columns name.  Return the tokens of the last one."""
        self._lay_out(size)
        tokens_N = self._pass(0, 0, size * self.width, self._first, self._last_M[:size])
        for nth in range(1, self._depth):
            tokens_N = self._pass(1, self._place(nth), size, self._later, self._all_M[:size])
        return tokens_N

    def _lay_out(self, size: int) -> None:
        """Write the columns of all passes from those that were asked for."""
        rows_B, given_B, given_lacking_B, counts_B = self._asked[:, :size]
        row_B, counted_B = rows_B.clamp(min=0), given_B < 0
        length_B = self._counts.lengths_R.index_select(0, row_B).to(torch.int64)
        ends_B = torch.where(counted_B, length_B + (1 - self._ahead), given_B)
        lacking_B = torch.where(counted_B, self._counts.lacking_R.index_select(0, row_B), given_lacking_B)
        there_BW = (self._nth_W >= -lacking_B[:, None]) & (rows_B >= 0)[:, None]
        rows_BW, positions_BW = self._packed[:, : size * self.width].view(2, size, self.width)
        rows_BW.copy_(torch.where(there_BW, rows_B[:, None], NO_ROW))
        positions_BW.copy_(torch.where(there_BW, ends_B[:, None] + self._nth_W, 0))
        most = self._kit.sizes[-1]
        rows_LB, positions_LB = self._packed[:, most * self.width :].view(2, self._depth - 1, most)[..., :size]
        rows_LB.copy_(torch.where(counts_B > self._nth_L, rows_B, NO_ROW))
        positions_LB.copy_(ends_B + (self._nth_L - 1))

    def _pass(self, kind: int, at: int, num: int, static: DecodeInputs, wanted_N: Tensor) -> Tensor:
        rows_B, given_B = self._packed[:, at : at + num]
        inputs = first_rows(static, num)
        pool = self._pool
        self._ops.fill(
            rows_B,
            given_B,
            self._tokens_RM,
            self._pages_RP,
            self._lengths_R,
            pool.page_size,
            pool.dump_page,
            inputs,
            pool.page_stride,
        )
        write_at_B = inputs.write_at_B
        if self._ahead:
            token_at_B = (write_at_B + (self._ahead - 1)).clamp(min=0)
            inputs.token_ids_B.copy_(self._tokens_RM.view(-1).index_select(0, token_at_B))
            write_at_B = torch.where(write_at_B < 0, write_at_B, write_at_B + self._ahead)
        attention = self._attends[kind].prepare(num)
        step = StepTensors(
            token_ids_T=inputs.token_ids_B,
            positions_T=inputs.positions_B,
            slots_T=inputs.slots_B,
            sample_at_N=wanted_N,
            attention=attention,
            pool=pool,
        )
        tokens_N = self._guess(step, rows_B.index_select(0, wanted_N), inputs.positions_B.index_select(0, wanted_N) + 1)
        self._ops.write(write_at_B.index_select(0, wanted_N), tokens_N, self._tokens_RM)
        return tokens_N
