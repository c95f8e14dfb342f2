"""Attention inside a decode graph: captured with the rest, where the backend can be.

Legend: M rows of the largest graph · B rows of a graph, padding included · N real rows · P page-table width
Owns: which of a backend's two ways is taken, what ``plan_step`` is told.  Does not know: kernels, captures.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch, GraphAttentionBuilder, is_capturable
from engine.layers.kv_pool import KVPool
from engine.layers.step import DecodeInputs

Int32 = npt.NDArray[np.int32]


class DecodeAttention(Protocol):
    """table_width: pages of a row that the captured step must write to its inputs."""

    table_width: int

    def prepare(self, size: int) -> AttentionBackend:
        """What a step of so many rows calls, ready for it to be run or captured."""
        ...

    def plan(self, size: int, lengths_N: Int32) -> None:
        """Called before each replay.  lengths_N: of the real rows, the new token included."""
        ...


class ResidentAttention:
    """A backend whose kernels read tables and lengths where the step itself has written them: nothing is planned."""

    def __init__(self, backend: AttentionBackend, inputs: DecodeInputs, max_rows: int) -> None:
        self.table_width = inputs.page_table_BW.shape[1]
        self._backend = backend
        self._inputs = inputs
        self._starts_M1 = torch.arange(max_rows + 1, dtype=torch.int32, device=inputs.lengths_B.device)

    def prepare(self, size: int) -> AttentionBackend:
        """See ``DecodeAttention``."""
        ones = np.ones(size, dtype=np.int32)
        self._backend.plan_step(
            AttentionBatch(
                num_decodes=size,
                page_table_BP=self._inputs.page_table_BW[:size],
                lengths_B=self._inputs.lengths_B[:size],
                query_starts_B1=self._starts_M1[: size + 1],
                host_lengths=ones,
                host_query_lengths=ones,
            )
        )
        return self._backend

    def plan(self, size: int, lengths_N: Int32) -> None:
        """Nothing."""


class PlannedAttention:
    """A backend that plans each step on the host, for a graph that it has built buffers for."""

    table_width = 1  # it gathers its own

    def __init__(
        self,
        builder: GraphAttentionBuilder,
        sizes: Sequence[int],
        pool: KVPool,
        rows_M: Tensor,
        pages_RP: Tensor,
        lengths_R: Tensor,
    ) -> None:
        """rows_M: int64, the batch's rows; real ones come first.  pages_RP, lengths_R: int32, of every row."""
        self._page_size = pool.page_size
        self._rows_M = rows_M
        self._pages_RP = pages_RP
        self._lengths_R = lengths_R
        device = pages_RP.device
        self._starts_M1 = torch.arange(len(rows_M) + 1, dtype=torch.int32, device=device)
        self._dump_11 = torch.full((1, 1), pool.dump_page, dtype=torch.int32, device=device)
        self._one_1 = torch.ones(1, dtype=torch.int32, device=device)
        self._backends = {size: builder.for_graph(size, pages_RP.shape[1]) for size in sorted(sizes, reverse=True)}

    def prepare(self, size: int) -> AttentionBackend:
        """See ``DecodeAttention``: one token of the dump page."""
        backend = self._backends[size]
        self._begin(backend, self._dump_11, self._one_1, np.ones(1, dtype=np.int32))
        return backend

    def plan(self, size: int, lengths_N: Int32) -> None:
        """See ``DecodeAttention``."""
        num_pages = -(-int(lengths_N.max()) // self._page_size)
        rows_N = self._rows_M[: len(lengths_N)]
        table_NP = self._pages_RP[:, :num_pages].index_select(0, rows_N)
        # The rows' own lengths advance in the graph, behind this.
        self._begin(self._backends[size], table_NP, self._lengths_R.index_select(0, rows_N) + 1, lengths_N)

    def _begin(self, backend: AttentionBackend, table_NP: Tensor, device_lengths_N: Tensor, lengths_N: Int32) -> None:
        num = len(lengths_N)
        backend.plan_step(
            AttentionBatch(
                num_decodes=num,
                page_table_BP=table_NP,
                lengths_B=device_lengths_N,
                query_starts_B1=self._starts_M1[: num + 1],
                host_lengths=lengths_N,
                host_query_lengths=np.ones(num, dtype=np.int32),
            )
        )


def can_capture(backend: AttentionBackend) -> bool:
    """Whether a decode step with this backend can be captured whole."""
    return is_capturable(backend) or isinstance(backend, GraphAttentionBuilder)
