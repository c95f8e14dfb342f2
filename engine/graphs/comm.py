"""Collectives inside a captured run: part of a graph if the library can be captured, a break if it cannot.

Legend: T rows of the run, padding included
Owns: that choice.  Does not know: which library runs, which layers call it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from engine.graphs.breakable import SegmentRecorder
from engine.layers.comm import Comm, ExchangingComm, NormingComm, is_capturable

COLLECTIVE = "collective"  # the kind of break


class BreakingComm:
    """A ``Comm`` around the chosen library, for a model whose run may be captured."""

    def __init__(self, comm: Comm, recorder: SegmentRecorder) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._comm = comm
        self._recorder = recorder
        self._capturable = is_capturable(comm)
        self._traced = False
        self._norming = comm if isinstance(comm, NormingComm) and self._capturable else None
        self.norms = self._norming is not None and self._norming.norms

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        """Return what a library that graphs can hold does (``NormingComm``)."""
        return None if self._norming is None or self._traced else self._norming.add_norm(x_TD, part_TD, weight_D, eps)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place.  tensor: a row per token; a captured run sends real rows and zeroes padding."""
        if self._traced:
            torch.ops.callboard.all_reduce(tensor)
            return tensor
        if self._capturable or not self._recorder.recording:
            return self._comm.all_reduce(tensor)
        self._recorder.run(COLLECTIVE, partial(self._reduce_eagerly, self._recorder.weak(tensor)))
        return tensor

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Make sums leave a mark instead of summing.

        torch's own ``is_compiling`` is true for the whole process, in which other ranks may be running."""
        self._traced = True
        try:
            yield
        finally:
            self._traced = False

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if self._capturable or not self._recorder.recording:
            return self._comm.all_gather(tensor, dim)
        gathered: Tensor = self._recorder.call(COLLECTIVE, self._comm.all_gather, (tensor, dim), {})
        return gathered

    @property
    def exchanges(self) -> bool:
        """Whether the library does, in a run that is not recorded."""
        can = isinstance(self._comm, ExchangingComm) and self._comm.exchanges
        return can and not self._traced and not self._recorder.recording

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert isinstance(self._comm, ExchangingComm), "the library has no all_to_all"
        return self._comm.all_to_all(tensor, sent, received)

    def close(self) -> None:
        self._comm.close()

    def _reduce_eagerly(self, x_TD: Tensor) -> None:
        num_tokens = self._recorder.num_tokens
        self._comm.all_reduce(x_TD[:num_tokens])
        if num_tokens < len(x_TD):
            x_TD[num_tokens:].zero_()
