"""Rows of a device whose memory is the host's: numpy reads and writes them.

Legend: as in ``rows.py``
Owns: the same tensors, as arrays.  Does not know: what a step means for them.

A decode step is a dozen operations on a few numbers each, and a numpy operation takes a third of the time of torch's.
"""

import numpy as np
import torch
from torch import Tensor

from engine.execution.batch import Batch, Int32, Int64
from engine.execution.rows import DeviceRows, StepInputs


class HostRows(DeviceRows):
    """The rows of a device whose memory is the host's.  No step is captured there, so no lengths are kept."""

    def inputs(self, batch: Batch) -> StepInputs:
        """Return a batch as tensors, each with memory of its own."""
        row_len, width = self.tokens_RM.shape[1], self.pages_RP.shape[1]
        page_T, offset_T = np.divmod(batch.positions_T, self._page_size)
        pages_T = self._pages_flat.numpy().take(batch.rows_T * width + page_T)
        num_pages = -(-int(batch.lengths_B.max()) // self._page_size)
        columns = (
            self._tokens_flat.numpy().take(batch.rows_T * row_len + batch.positions_T).astype(np.int64),
            batch.positions_T,
            pages_T * np.int64(self._page_stride) + offset_T,
            batch.sample_at_N,
            batch.sample_rows_N * row_len + batch.sample_positions_N,
            self.pages_RP.numpy()[batch.rows_B, :num_pages],
            batch.lengths_B,
            batch.query_starts_B1.astype(np.int32),
        )
        return StepInputs(*map(torch.from_numpy, columns))

    def write_sampled(self, write_at_N: Tensor, token_ids_N: Tensor) -> None:
        """Put sampled tokens where the next step reads them; -1 (a failed row) is written as 0."""
        self._tokens_flat.numpy()[write_at_N.numpy()] = np.maximum(token_ids_N.numpy(), 0)

    def _write(self, token_places: Int64, page_places: Int64, tokens: Int32, pages: Int32) -> None:
        self._tokens_flat.numpy()[token_places] = tokens
        self._pages_flat.numpy()[page_places] = pages
