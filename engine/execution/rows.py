"""The device's copy of every row: its tokens and its page table, changed only by steps.

Legend: R rows · P page-table width · M longest sequence · T new tokens · B sequences · N sampled rows
Owns: token ids, page table, and how many positions of each row are computed.  Does not know: sampling, attention.
"""

from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.execution.batch import Batch, Int32, Int64
from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.layers.upload import upload
from engine.messages import Step

NOWHERE = np.empty(0, dtype=np.int64)
NO_INTS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch as tensors: int64, except page_table_BP, lengths_B and query_starts_B1, which are int32.

    token_ids_T, positions_T, slots_T: per new token.  sample_at_N: indexes in T from which tokens are sampled.
    write_at_N: the tokens' places in the flat token table.  The others are those of ``AttentionBatch``.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sample_at_N: Tensor
    write_at_N: Tensor
    page_table_BP: Tensor
    lengths_B: Tensor
    query_starts_B1: Tensor
    shares: bool = field(default=True, kw_only=True)

    def planned(self, batch: Batch, attention: AttentionBackend, pool: KVPool) -> StepTensors:
        """Plan ``batch``, whose inputs these are, for attention.  Return the tensors for the model."""
        tensors = (self.page_table_BP, self.lengths_B, self.query_starts_B1)
        host = (batch.lengths_B, batch.query_lengths_B)
        attention.plan_step(AttentionBatch(batch.num_decodes, *tensors, *host, self.shares))
        return StepTensors(
            token_ids_T=self.token_ids_T,
            positions_T=self.positions_T,
            slots_T=self.slots_T,
            sample_at_N=self.sample_at_N,
            attention=attention,
            pool=pool,
        )


class DeviceRows:
    """The rows of one device.

    tokens_RM: int32; a sampled token is written here, so the next step finds it without the host.
    pages_RP: int32.  computed: host, int32 [R].  lengths_R: the same on the device after ``keep_lengths``: equal for
    every row in use, whenever no step is half launched.
    """

    def __init__(self, max_rows: int, max_len: int, page_size: int, device: torch.device, page_stride: int = 0) -> None:
        """Allocate the tables.  page_stride: the pool's; 0 for page_size."""
        self._device = device
        self._page_size = page_size
        self._page_stride = page_stride or page_size
        width = -(-max_len // page_size)
        # One place more than the longest sequence: the token after the last one is written and never read.
        self.tokens_RM = _zeros((max_rows, max_len + 1), device)
        self.pages_RP = _zeros((max_rows, width), device)
        self.computed = np.zeros(max_rows, dtype=np.int32)
        self.lengths_R: Tensor | None = None
        # Pages are shared from the first one on, so rows with different first pages share none.
        self._first_pages = np.zeros(max_rows, dtype=np.int32)
        self._sampled_R = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tokens_flat = self.tokens_RM.view(-1)
        self._pages_flat = self.pages_RP.view(-1)

    def for_pool(self, page_stride: int, ahead: int = 0) -> "DeviceRows":
        """Return the same rows for another model's pool: tokens ``ahead`` places earlier, ``computed`` of its own."""
        other = copy(self)
        other._tokens_flat = self._tokens_flat[ahead:]
        other._page_stride = page_stride
        other.computed = np.zeros_like(self.computed)
        other.lengths_R = None
        return other

    def tokens_at(self, rows_K: Int32, positions_K: Int32) -> Tensor:
        """Return tokens, int32[K], a copy."""
        return self._tokens_flat.index_select(
            0, self.upload(rows_K.astype(np.int64) * self.tokens_RM.shape[1] + positions_K)
        )

    def keep_lengths(self) -> Tensor:
        """Return lengths_R, kept from now on: for steps that advance by themselves, without the host."""
        if self.lengths_R is None:
            self.lengths_R = torch.from_numpy(self.computed.copy()).to(self._device)
        return self.lengths_R

    def restore(self, computed: Int32) -> None:
        """Return to the state before a step that has failed.  Takes no memory of the device."""
        self.computed[:] = computed
        if self.lengths_R is not None:
            self.lengths_R.copy_(torch.from_numpy(computed))

    def apply(self, step: Step) -> None:
        """Take in the sequences that a step admits and its entries of page tables, by one packed copy for all."""
        if not step.admissions and not step.table_rows:
            return
        row_len, width = self.tokens_RM.shape[1], self.pages_RP.shape[1]
        tokens, pages, token_places, page_places = [], [], [NOWHERE], []
        for admission in step.admissions:
            row = admission.row
            tokens.append(np.frombuffer(admission.token_ids, dtype=np.int32))
            pages.append(np.frombuffer(admission.pages, dtype=np.int32))
            token_places.append(np.arange(row * row_len, row * row_len + len(tokens[-1])))
            page_places.append(np.arange(row * width, row * width + len(pages[-1])))
            self.computed[row] = admission.num_computed_tokens
        places_A, pages_A = self.appends(step)
        self._write(
            np.concatenate(token_places),
            np.concatenate((*page_places, places_A)),
            np.concatenate((*tokens, NO_INTS)),
            np.concatenate((*pages, pages_A)),
        )

    def write_tokens(self, rows_K: Int32, positions_K: Int32, tokens_K: Int32) -> None:
        """Write tokens that are not sampled."""
        self._write(rows_K.astype(np.int64) * self.tokens_RM.shape[1] + positions_K, NOWHERE, tokens_K, NO_INTS)

    def _write(self, token_places: Int64, page_places: Int64, tokens: Int32, pages: Int32) -> None:
        """Write tokens and pages at places of the flat tables."""
        columns = (token_places, page_places, tokens, pages)
        token_at, page_at, token_ids, page_ids = upload(columns, self._device)
        self._tokens_flat.index_copy_(0, token_at, token_ids)
        self._pages_flat.index_copy_(0, page_at, page_ids)
        rows, indexes = np.divmod(page_places, self.pages_RP.shape[1])
        self._first_pages[rows[indexes == 0]] = pages[indexes == 0]

    def appends(self, step: Step) -> tuple[Int64, Int32]:
        """Return a step's writes to page tables: places in the flat page table, and the pages."""
        rows = np.frombuffer(step.table_rows, dtype=np.int32).astype(np.int64)
        indexes = np.frombuffer(step.table_indexes, dtype=np.int32)
        return rows * self.pages_RP.shape[1] + indexes, np.frombuffer(step.table_pages, dtype=np.int32)

    def upload(self, array: np.ndarray) -> Tensor:
        """Return a host array on the device; on CPU it shares its memory."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def inputs(self, batch: Batch) -> StepInputs:
        """Return a batch on the device, by one packed copy."""
        num_tokens, num_sequences, num_sampled = len(batch.rows_T), len(batch.rows_B), len(batch.sample_at_N)
        row_len, width = self.tokens_RM.shape[1], self.pages_RP.shape[1]
        page_T, offset_T = np.divmod(batch.positions_T, self._page_size)
        columns = (
            batch.rows_T * row_len + batch.positions_T,
            batch.rows_T * width + page_T,
            offset_T,
            batch.positions_T,
            batch.sample_at_N,
            batch.sample_rows_N * row_len + batch.sample_positions_N,
            batch.rows_B,
            batch.lengths_B,
            batch.query_starts_B1,
        )
        sizes = [num_tokens] * 4 + [num_sampled] * 2 + [num_sequences, 2 * num_sequences + 1]
        token_at_T, page_at_T, offsets_T, positions_T, sample_at_N, write_at_N, rows_B, lengths_and_starts = (
            self.upload(np.concatenate(columns)).split(sizes)
        )
        lengths_B, query_starts_B1 = lengths_and_starts.to(torch.int32).split((num_sequences, num_sequences + 1))
        if self.lengths_R is not None:
            self.lengths_R.index_copy_(0, rows_B, lengths_B)
        num_pages = -(-int(batch.lengths_B.max()) // self._page_size)
        return StepInputs(
            token_ids_T=self._tokens_flat.index_select(0, token_at_T).to(torch.int64),
            positions_T=positions_T,
            slots_T=offsets_T.add(self._pages_flat.index_select(0, page_at_T), alpha=self._page_stride),
            sample_at_N=sample_at_N,
            write_at_N=write_at_N,
            page_table_BP=self.pages_RP[:, :num_pages].index_select(0, rows_B),
            lengths_B=lengths_B,
            query_starts_B1=query_starts_B1,
            shares=np.unique(self._first_pages[batch.rows_B[: batch.num_decodes]]).size < batch.num_decodes,
        )

    def write_sampled(self, write_at_N: Tensor, token_ids_N: Tensor) -> None:
        """Put sampled tokens where the next step reads them.  -1 (a failed row) is written as 0, which is never read.

        Takes no memory of the device: penalties have counted the tokens by now, and would count them again."""
        num_rows = len(self._sampled_R)  # each row may have several tokens
        for write_at_n, token_ids_n in zip(write_at_N.split(num_rows), token_ids_N.split(num_rows), strict=True):
            clamped_n = self._sampled_R[: len(token_ids_n)].copy_(token_ids_n).clamp_(min=0)
            self._tokens_flat.index_copy_(0, write_at_n, clamped_n)


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))  # calloc: untouched rows take no memory
    return torch.zeros(shape, dtype=torch.int32, device=device)
