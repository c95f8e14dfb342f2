"""A draft model next to the model: it decodes the tokens that a step will verify, just before the step.

Legend: R rows · P pages · B rows that are drafted for · D most drafted tokens of a row
        K drafted tokens, those of a row side by side · N sampled rows
Owns: which keys and values of the draft model there are, its passes.  Does not know: what becomes of its tokens.

It has a pool of its own with as many pages as the model's, under the same page tables, and reads and writes the same
tokens.  It computes only when tokens are drafted, and then everything that it lacks of a row, so requests without
speculation cost nothing.  It counts what it has by page, so prompts that share pages also share its keys and values.
Ranks divide it as they divide the model, so that all of them draft the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.batch import Int32, lay_out
from engine.execution.rows import NO_INTS, DeviceRows
from engine.features.speculation.counted_tokens import BY_DEVICE, CountedTokens
from engine.features.speculation.draft_chain import CHAINS, DraftChain
from engine.features.speculation.messages import Proposals
from engine.graphs.rank import CaptureKit, RankGraphs
from engine.layers.attention import AttentionBackend, is_capturable
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.messages import Admission, Step
from engine.models.model import Model


def _ints(column: bytes) -> Int32:
    return np.frombuffer(column, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafted tokens on their way to the host, int32[B, D].  counts_B: how many of them a row has."""

    rows_B: Int32
    counts_B: npt.NDArray[np.int64]
    tokens_BD: Tensor

    def by_row(self) -> dict[int, bytes]:
        """Return row -> its tokens.  Call it when the device is done with the step."""
        every = zip(self.rows_B.tolist(), self.counts_B.tolist(), self.tokens_BD.numpy(), strict=True)
        return {row: tokens_D[:count].tobytes() for row, count, tokens_D in every if count}


class Drafter:
    """A drafter that has a model of its own.

    filled_P: number of slots of each page, from the first on, that hold keys and values of the draft model.
    pages_RP: a copy of the page table on the host.

    rows: the model's rows.  vocab_size: number of tokens that both models have.
    num_tokens: the most tokens drafted for a row.  most_tokens: tokens of one pass, unless more rows are drafted for.
    ahead: as in ``DeviceRows.for_pool``; positions in steps are then those of the model less ``ahead``."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        rows: DeviceRows,
        *,
        vocab_size: int,
        num_tokens: int,
        most_tokens: int,
        ahead: int = 0,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._rows = rows.for_pool(pool.page_stride, ahead)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._most_tokens = most_tokens
        self._ahead = ahead
        self._chain: DraftChain | None = None
        self._counted = CountedTokens(rows, num_tokens)
        self._counted_rows: dict[int, int] = {}  # whose count here is out of date: tokens that were not drafted behind
        # The last rows to draft for, and numbers of known tokens; None if only the device has these.
        self._asked: tuple[Int32, Int32 | None] = NO_INTS, NO_INTS
        self._has_drafted = False  # for them
        self._unread: set[int] = set()  # of the last rows to draft for, those of which too much is to be read
        self._filled_P = np.zeros(pool.num_pages, dtype=np.int32)
        self._pages_RP = np.zeros(tuple(rows.pages_RP.shape), dtype=np.int32)

    def capture(
        self, graphs: RankGraphs, build_attention: Callable[[], AttentionBackend], max_rows: int, progress: bool
    ) -> None:
        """Capture the passes as one graph for each number of rows, if attention and the device can be captured.

        build_attention: builds another backend over the pool."""
        if is_capturable(self._attention):
            build = partial(self._new_chain, build_attention)
            self._chain = graphs.more(CHAINS, build, self._pool.data.device, max_rows, progress)

    def graph_bytes(self, graphs: RankGraphs, build_attention: Callable[[], AttentionBackend], max_rows: int) -> int:
        """Return the bytes that ``capture`` will take."""
        if not is_capturable(self._attention):
            return 0
        return graphs.more_bytes(partial(self._new_chain, build_attention), self._pool.data.device, max_rows)

    def _new_chain(self, build_attention: Callable[[], AttentionBackend], kit: CaptureKit) -> DraftChain:
        return DraftChain(
            kit,
            self._guess,
            self._pool,
            (build_attention(), build_attention()),
            self._rows.tokens_RM,
            self._rows.pages_RP,
            self._counted.keep(),
            width=self._most_lacking(),
            depth=self._num_tokens,
            ahead=self._ahead,
        )

    @property
    def by_graph(self) -> bool:
        """Whether the passes for any number of rows that decode by a graph are one graph."""
        return self._chain is not None

    def _most_lacking(self) -> int:
        """Return how many tokens a row lacks at most that was drafted for in the step before.

        If all drafted tokens were right, the last one has not been read, nor the one after it."""
        return 2

    # ---- the draft model's keys and values --------------------------------------------------

    def follow(self, step: Step, computed: Int32) -> None:
        """Take in the changes of pages and rows by a step.  computed: [R], positions of the model before the step."""
        if step.filled_pages:
            self._filled_P[_ints(step.filled_pages)] = 0
        for admission in step.admissions:
            self._admit(admission)
        if step.table_rows:
            self._note_pages(step, computed)
        if step.prefill_rows:
            # Drafted tokens after the start were wrong and do not count.
            rows, starts = _ints(step.prefill_rows), _ints(step.prefill_starts)
            self._rows.computed[rows] = np.minimum(self._rows.computed[rows], starts)
        for row in self._counted_rows.keys() & set(_ints(step.decode_rows).tolist()):
            self._counted_rows[row] += 1

    def _admit(self, admission: Admission) -> None:
        self._counted_rows.pop(admission.row, None)
        row, size, pages = admission.row, self._pool.page_size, _ints(admission.pages)
        num_shared = admission.num_computed_tokens // size
        self._pages_RP[row, : len(pages)] = pages
        self._filled_P[pages[num_shared:]] = 0
        filled = self._filled_P[pages[:num_shared]]
        num_whole = int(np.argmin(np.append(filled, 0) == size))
        self._rows.computed[row] = num_whole * size + (filled[num_whole] if num_whole < num_shared else 0)

    def _note_pages(self, step: Step, computed: Int32) -> None:
        """Note new pages, which are empty; one that replaces another page has the draft model's content of it."""
        rows, pages, size = _ints(step.table_rows), _ints(step.table_pages), self._pool.page_size
        indexes = _ints(step.table_indexes)
        self._pages_RP[rows, indexes] = pages
        starts = indexes * size
        self._filled_P[pages[starts >= computed[rows]]] = 0
        filled = self._filled_P[pages]
        short = (filled < size) & (starts < computed[rows])
        np.minimum.at(self._rows.computed, rows[short], starts[short] + filled[short])

    def _note_filled(self, row: int, before: int, end: int) -> None:
        """Note that the draft model has computed all before ``end``.

        Before ``before``, drafted tokens that were right have not been noted yet."""
        size = self._pool.page_size
        indexes = np.arange(max(0, before - self._num_tokens) // size, -(-end // size))
        pages = self._pages_RP[row, indexes]
        self._filled_P[pages] = np.maximum(self._filled_P[pages], np.minimum(size, end - indexes * size))

    # ---- drafting ---------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, step: Step, proposals: Proposals) -> Drafted:
        """Draft tokens for the places that the proposals name; 0 for a row of which too much must be read first."""
        rows_K, positions_K, _ = proposals.columns()
        rows_B, first_B = np.unique(rows_K, return_index=True)
        self._asked = rows_B, None if proposals.counted else positions_K[first_B] + self._ahead
        self._has_drafted = False
        computed = self._rows.computed.copy()
        try:
            drafted = self._draft(step, proposals)
        except Exception:
            self._rows.computed[:] = computed  # a pass that failed does not count: its progress is unknown
            raise
        self._has_drafted = True
        return drafted

    def _draft(self, step: Step, proposals: Proposals) -> Drafted:
        rows_K, positions_K, tokens_K = proposals.columns()
        self._rows.apply(
            Step(
                step_id=step.step_id,
                table_rows=step.table_rows,
                table_indexes=step.table_indexes,
                table_pages=step.table_pages,
            )
        )
        rows_B, first_B, counts_B = np.unique(rows_K, return_index=True, return_counts=True)
        ends_B = positions_K[first_B]
        if proposals.counted:
            drafting_B = self._replay_counted(rows_B, counts_B)
        else:
            self._rows.write_tokens(rows_K, positions_K, np.zeros_like(tokens_K))
            self._catch_up(rows_B, ends_B)
            drafting_B = self._replay(rows_B, ends_B, counts_B)
            if not drafting_B.all():
                rest_B = ~drafting_B
                drafting_B[rest_B] = self._one_by_one(step.step_id, rows_B[rest_B], ends_B[rest_B], counts_B[rest_B])
            self._unread = set(rows_B[~drafting_B].tolist())
        counts_B = np.where(drafting_B, counts_B, 0)
        said_BD = self._counted.begin(rows_B, None if proposals.counted else ends_B + self._ahead, counts_B)
        if said_BD.is_cuda:
            said_BD = torch.empty_like(said_BD, device="cpu", pin_memory=True).copy_(said_BD, non_blocking=True)
        return Drafted(rows_B, counts_B, said_BD)

    def count(self, *, given: bool) -> None:
        """Count the drafted tokens of the last step that were right, on the device, behind all parts of that step.

        given: they are in its result.  If not, or if drafting has failed, none counts, and the draft may have read
        anything of the rows."""
        if given and self._has_drafted:
            self._counted.end(self._lacking)
        else:
            rows_B, ends_B = self._asked
            self._counted.put(rows_B, ends_B)
            self._unread.update(rows_B.tolist())
            for row in rows_B.tolist():
                self._counted_rows.pop(row, None)  # what it has read for sure is what the host knew before
        self._counted.note()

    def known(self) -> Int32:
        """Return the lengths of all rows before the step that is half launched, after a wait for the device."""
        lengths_R = self._counted.read()
        rows_B, _ = self._asked
        self._asked = rows_B, lengths_R[rows_B] + 1
        return lengths_R

    def _lacking(self, counts_B: Tensor, right_B: Tensor) -> Tensor:
        """Return how many tokens rows lack next, after so many drafted ones of which so many were right."""
        return (right_B + 2 - counts_B).clamp(min=1)

    def _replay_counted(self, rows_B: Int32, counts_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Draft by one graph for rows whose lengths only the device knows.  Return for which."""
        assert self._chain is not None, "ranks without graphs have said that they count tokens"
        drafting_B = np.array([row not in self._unread for row in rows_B.tolist()])
        rows = rows_B[drafting_B]
        if len(rows):
            unknown = np.full(len(rows), BY_DEVICE, dtype=np.int32)
            self._chain.replay(rows, unknown, unknown, counts_B[drafting_B])
        self._counted_rows.update(dict.fromkeys(rows.tolist(), 0))
        return drafting_B

    def _catch_up(self, rows_B: Int32, ends_B: Int32) -> None:
        """Note what was drafted for rows while only the device knew their lengths."""
        for row, end in zip(rows_B.tolist(), ends_B.tolist(), strict=True):
            if (num_more := self._counted_rows.pop(row, None)) is not None:
                before = int(self._rows.computed[row])
                self._rows.computed[row] = max(before, end - self._most_lacking() - num_more)
                self._note_filled(row, before, int(self._rows.computed[row]))

    def _replay(self, rows_B: Int32, ends_B: Int32, counts_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Draft by one graph.  Return for which rows: not for those that lack too much, nor if there is no graph."""
        computed_B = np.minimum(self._rows.computed[rows_B], ends_B - 1)
        chain = self._chain
        short_B = ends_B - computed_B <= (0 if chain is None else chain.width)
        if chain is None or not short_B.any() or not chain.fits(int(short_B.sum())):
            return np.zeros(len(rows_B), dtype=np.bool_)
        rows, ends, counts, computed = rows_B[short_B], ends_B[short_B], counts_B[short_B], computed_B[short_B]
        chain.replay(rows, ends, ends - computed, counts)
        self._rows.computed[rows] = ends + counts - 1
        for row, start, end in zip(rows.tolist(), computed.tolist(), ends.tolist(), strict=True):
            self._note_filled(row, start, end)
        return short_B

    def _one_by_one(
        self, step_id: int, rows_B: Int32, ends_B: Int32, counts_B: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Draft by passes of their own.  Return for which rows, as ``_read``."""
        drafting_B = self._read(step_id, rows_B, ends_B)
        for nth in range(1, int(counts_B.max())):
            more = rows_B[drafting_B & (counts_B > nth)]
            if len(more):
                self._pass(Step(step_id=step_id, decode_rows=more.tobytes()))
        return drafting_B

    def _read(self, step_id: int, rows_B: Int32, ends_B: Int32) -> npt.NDArray[np.bool_]:
        """Compute what each row lacks before ``ends_B``, as far as one pass goes.

        Return for which rows that was all: their first token is drafted."""
        computed_B = np.minimum(self._rows.computed[rows_B], ends_B - 1)
        self._rows.computed[rows_B] = computed_B
        lacking_B = ends_B - computed_B
        order = np.argsort(
            lacking_B, kind="stable"
        )  # rows that have read their prompts do not wait for those that have not
        most = max(self._most_tokens, len(rows_B) * (self._num_tokens + 2))
        lengths_B = np.empty_like(lacking_B)
        before_B = np.cumsum(lacking_B[order]) - lacking_B[order]
        lengths_B[order] = np.minimum(np.maximum(most - before_B, 0), lacking_B[order])
        is_whole_B = lengths_B == lacking_B
        one_B = is_whole_B & (lengths_B == 1)
        more_B = (lengths_B > 0) & ~one_B
        self._pass(
            Step(
                step_id=step_id,
                decode_rows=rows_B[one_B].tobytes(),
                prefill_rows=rows_B[more_B].tobytes(),
                prefill_starts=computed_B[more_B].tobytes(),
                prefill_lengths=lengths_B[more_B].tobytes(),
                prefill_samples=is_whole_B[more_B].astype(np.int32).tobytes(),
            )
        )
        for row, start, length in zip(rows_B.tolist(), computed_B.tolist(), lengths_B.tolist(), strict=True):
            self._note_filled(row, start, start + length)
        return is_whole_B

    def _pass(self, step: Step) -> None:
        """Run one forward pass; the likeliest tokens are written where the next pass, and the model, read them."""
        batch = lay_out(step, self._rows.computed)
        inputs = self._rows.inputs(batch)
        tensors = inputs.planned(batch, self._attention, self._pool)
        rows_N, positions_N = (self._rows.upload(one) for one in (batch.sample_rows_N, batch.sample_positions_N))
        tokens_N = self._guess(tensors, rows_N, positions_N)
        if len(tokens_N):
            self._rows.write_sampled(inputs.write_at_N, tokens_N)

    def _guess(self, tensors: StepTensors, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Run one forward pass, and return the likeliest tokens.

        rows_N, positions_N: of these tokens; padding has negative rows."""
        # A model's vocabulary may be padded to another size than the other model's.
        tensors.token_ids_T.clamp_(max=self._model.vocab_size - 1)
        return self._model.forward(tensors)[:, : self._vocab_size].argmax(-1)
