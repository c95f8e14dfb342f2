"""Attention inside a captured run: it always breaks the capture and is never part of a graph.

Legend: T rows of the run, padding included (ragged, packed) · M most rows of any run · N query heads · H head size
Owns: the one buffer that attention writes to, the padding of its result.
Does not know: which backend runs, how captures are broken.

A backend's plan depends on the lengths that the host knows.  A captured attention would repeat the lengths of the
capture and produce fluent nonsense, so every way to that is an error.
"""

from functools import partial

import torch
from torch import Tensor

from engine.graphs.breakable import SegmentRecorder
from engine.graphs.device import GraphDevice
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec, writer_of
from engine.types.errors import GraphError

ATTENTION = "attention"  # the kind of break


class BreakingAttention:
    """An ``AttentionBackend`` around the chosen backend, for a model whose run may be captured.

    max_tokens: rows of the largest run; 0 if only ``attend_into`` is used.
    out_MNH: output of ``attend``.  All layers and sizes share it: a layer's result has been read before the next
    layer's attention.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        recorder: SegmentRecorder,
        device: GraphDevice,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._backend = backend
        self._write = writer_of(backend)
        self._recorder = recorder
        self._device = device
        self._differ = bool(spec.heads)  # whether layers' results have several sizes
        self.out_MNH = device.buffer((max_tokens, spec.num_heads, spec.value_size), dtype)

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan the step; called before it is run or replayed."""
        self._backend.plan_step(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return the attention of one layer, valid until the next layer's call."""
        out_TNH = self.out_MNH[: len(q_TNH)]
        if self._differ:
            out_TNH = self.out_MNH.view(-1)[: q_TNH.numel()].view(q_TNH.shape)
        # One buffer for all layers: padding that is zero in the first layer stays zero.
        self._break(layer, q_TNH, out_TNH, zeroed=layer == 0 or self._differ)
        return out_TNH

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Compute ``attend`` into ``out_TNH``, which must be at the same address at every replay."""
        self._break(layer, q_TNH, out_TNH, zeroed=True)

    def _break(self, layer: int, q_TNH: Tensor, out_TNH: Tensor, zeroed: bool) -> None:
        weak = self._recorder.weak
        self._recorder.run(ATTENTION, partial(self._attend_eagerly, layer, weak(q_TNH), weak(out_TNH), zeroed))

    def _attend_eagerly(self, layer: int, q_TNH: Tensor, out_TNH: Tensor, zeroed: bool) -> None:
        if self._device.is_capturing():
            raise GraphError(
                f"attention of layer {layer} was about to be captured instead of breaking the capture; its work "
                "depends on the step's lengths, and replays would repeat those of the capture"
            )
        num_tokens = self._recorder.num_tokens
        self._write(layer, q_TNH[:num_tokens], out_TNH[:num_tokens])
        if zeroed and num_tokens < len(out_TNH):
            out_TNH[num_tokens:].zero_()
