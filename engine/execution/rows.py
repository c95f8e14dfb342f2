"""The device's copy of every row: its tokens and its page table, changed only by what a step tells.

Legend: R rows · P page-table width · M longest sequence
Owns: token ids, page table, and how many positions of each row are computed.  Does not know: sampling, attention.
"""

import numpy as np
import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.messages import Admission, Step


class DeviceRows:
    """tokens_RM: int32; a sampled token is written here, so the next step finds it without the host.
    pages_RP: int32.  computed: host, int32 [R]."""

    def __init__(self, max_rows: int, max_len: int, page_size: int, device: torch.device) -> None:
        self._device = device
        self._page_size = page_size
        width = -(-max_len // page_size)
        # One place more than the longest sequence: the token after the last one is written and never read.
        self.tokens_RM = _zeros((max_rows, max_len + 1), device)
        self.pages_RP = _zeros((max_rows, width), device)
        self.computed = np.zeros(max_rows, dtype=np.int32)
        self._tokens_flat = self.tokens_RM.view(-1)
        self._pages_flat = self.pages_RP.view(-1)

    def apply(self, step: Step) -> None:
        """Take in a step's admissions and page appends: one packed copy for each kind that is present."""
        for admission in step.admissions:
            self._admit(admission)
        if step.append_rows:
            rows = np.frombuffer(step.append_rows, dtype=np.int32).astype(np.int64)
            indexes = np.frombuffer(step.append_indexes, dtype=np.int32)
            pages = np.frombuffer(step.append_pages, dtype=np.int32)
            packed = self.upload(np.stack((rows * self.pages_RP.shape[1] + indexes, pages)))
            self._pages_flat.index_copy_(0, packed[0], packed[1].to(torch.int32))

    def _admit(self, admission: Admission) -> None:
        row = admission.row
        tokens = np.frombuffer(admission.token_ids, dtype=np.int32)
        pages = np.frombuffer(admission.pages, dtype=np.int32)
        self.computed[row] = admission.num_computed_tokens
        packed = self.upload(np.concatenate((tokens, pages)))
        self.tokens_RM[row, : len(tokens)] = packed[: len(tokens)]
        self.pages_RP[row, : len(pages)] = packed[len(tokens) :]

    def upload(self, array: np.ndarray) -> Tensor:
        """A host array on the device; on CPU the same memory."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(token ids, positions, slots) of T, and where in T to sample: int64, from one packed copy."""
        num_tokens = len(batch.rows_T)
        token_at = batch.rows_T * self.tokens_RM.shape[1] + batch.positions_T
        page_at = batch.rows_T * self.pages_RP.shape[1] + batch.positions_T // self._page_size
        packed = self.upload(
            np.concatenate(
                (token_at, page_at, batch.positions_T % self._page_size, batch.positions_T, batch.sample_at_N)
            )
        )
        token_at_T, page_at_T, offset_T, positions_T = packed[: 4 * num_tokens].view(4, num_tokens).unbind()
        token_ids_T = self._tokens_flat.index_select(0, token_at_T).to(torch.int64)
        slots_T = self._pages_flat.index_select(0, page_at_T).to(torch.int64) * self._page_size + offset_T
        return token_ids_T, positions_T, slots_T, packed[4 * num_tokens :]

    def write_sampled(self, batch: Batch, token_ids_N: Tensor) -> None:
        """Put sampled tokens where the next step reads them.  -1 (a failed row) is written as 0: nobody reads it."""
        at = self.upload(batch.sample_rows_N * self.tokens_RM.shape[1] + batch.sample_positions_N)
        self._tokens_flat.index_copy_(0, at, token_ids_N.clamp(min=0).to(torch.int32))


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))  # calloc: untouched rows take no memory
    return torch.zeros(shape, dtype=torch.int32, device=device)
