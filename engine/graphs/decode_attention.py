"""Attention inside a decode graph: captured with the rest if the backend can be.

Legend: M rows of the largest graph · B rows of a graph, padding included · N real rows
Owns: the batch of each size, the input of ``plan_step`` before a replay.  Does not know: kernels, captures.

Tables and lengths are the static inputs, which the captured step writes itself, so nothing is gathered or copied here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.layers.attention import AttentionBackend, AttentionBatch, GraphAttentionBuilder, is_capturable
from engine.layers.step import DecodeInputs

Int32 = npt.NDArray[np.int32]


class DecodeAttention:
    """One backend for all sizes, whose kernels need no plan; or one for each size, planned with the lengths."""

    def __init__(self, backend: AttentionBackend, inputs: DecodeInputs, sizes: Sequence[int]) -> None:
        """Build a backend per size if needed.  backend: one for which ``can_capture`` is true."""
        device = inputs.lengths_B.device
        self._inputs = inputs
        self._starts_M1 = torch.arange(max(sizes) + 1, dtype=torch.int32, device=device)
        self._batches = {size: self._batch(size) for size in sizes}
        self._planned: dict[int, AttentionBackend] = {}
        if not is_capturable(backend):
            assert isinstance(backend, GraphAttentionBuilder), "see can_capture"
            self._planned = {size: backend.for_graph(self._batches[size]) for size in sorted(sizes, reverse=True)}
        self._backend = backend

    def prepare(self, size: int) -> AttentionBackend:
        """Return the backend for a step of so many rows, planned so that the step can be run or captured."""
        backend = self._planned.get(size, self._backend)
        backend.plan_step(self._batches[size])
        return backend

    def plan(self, size: int, lengths_N: Int32) -> None:
        """Plan a replay.  lengths_N: of the real rows, the new token included."""
        if not self._planned:
            return
        batch = self._batches[size]
        lengths = batch.host_query_lengths.copy()
        lengths[: len(lengths_N)] = lengths_N
        self._planned[size].plan_step(
            AttentionBatch(
                num_decodes=size,
                page_table_BP=batch.page_table_BP,
                lengths_B=batch.lengths_B,
                query_starts_B1=batch.query_starts_B1,
                host_lengths=lengths,
                host_query_lengths=batch.host_query_lengths,
            )
        )

    def _batch(self, size: int) -> AttentionBatch:
        """Return a batch of rows of one token each."""
        ones = np.ones(size, dtype=np.int32)
        return AttentionBatch(
            num_decodes=size,
            page_table_BP=self._inputs.page_table_BW[:size],
            lengths_B=self._inputs.lengths_B[:size],
            query_starts_B1=self._starts_M1[: size + 1],
            host_lengths=ones,
            host_query_lengths=ones,
        )


def can_capture(backend: AttentionBackend) -> bool:
    """Return whether a decode step with this backend can be captured whole."""
    return is_capturable(backend) or isinstance(backend, GraphAttentionBuilder)
