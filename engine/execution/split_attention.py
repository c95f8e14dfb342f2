"""Two attention backends as one: prompts go to the first, decode rows to the second.

Legend: T new tokens in the step (ragged, packed) · B sequences · D decode rows (the first D of B, one query each)
        P page-table width · N query heads · H head size
Owns: cutting a step in two.  Does not know: kernels.  It is no plugin: two names in ``plugins.attention`` make one.
"""

from torch import Tensor

from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    GraphAttentionBuilder,
    is_capturable,
    writer_of,
)


class SplitAttention:
    """An ``AttentionBackend`` of two.  A step of one kind goes to its backend unchanged; none waits for the device."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, value_size: int = 0) -> None:
        """Put two backends together.  value_size: numbers of a head's result; 0 for as many as its query has."""
        self._value_size = value_size
        self._prefill = prefill
        self._decode = decode
        self._write_prefill = writer_of(prefill)
        self._write_decode = writer_of(decode)
        self._num_decodes = 0
        self._mixed = False
        # A captured step has decode rows alone.
        self.capturable = is_capturable(decode)
        if isinstance(decode, GraphAttentionBuilder):
            self.for_graph = decode.for_graph

    def plan_step(self, batch: AttentionBatch) -> None:
        """Let each backend prepare its part."""
        count = self._num_decodes = batch.num_decodes
        self._mixed = 0 < count < len(batch.host_lengths)
        if not self._mixed:
            (self._decode if count else self._prefill).plan_step(batch)
            return
        self._decode.plan_step(
            AttentionBatch(
                num_decodes=count,
                page_table_BP=batch.page_table_BP[:count],
                lengths_B=batch.lengths_B[:count],
                query_starts_B1=batch.query_starts_B1[: count + 1],
                host_lengths=batch.host_lengths[:count],
                host_query_lengths=batch.host_query_lengths[:count],
                shares=batch.shares,
            )
        )
        self._prefill.plan_step(
            AttentionBatch(
                num_decodes=0,
                page_table_BP=batch.page_table_BP[count:],
                lengths_B=batch.lengths_B[count:],
                # Every decode row has one query, so the host knows where the segments begin.
                query_starts_B1=batch.query_starts_B1[count:] - count,
                host_lengths=batch.host_lengths[count:],
                host_query_lengths=batch.host_query_lengths[count:],
            )
        )

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Attend in one layer, as ``AttentionBackend.attend``."""
        count = self._num_decodes
        if not self._mixed:
            return (self._decode if count else self._prefill).attend(layer, q_TNH)
        out_TNH = q_TNH.new_empty((*q_TNH.shape[:2], self._value_size or q_TNH.shape[2]))
        self.attend_into(layer, q_TNH, out_TNH)
        return out_TNH

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Attend in one layer and write the result to a tensor, as ``WritingAttention.attend_into``."""
        count = self._num_decodes if self._mixed else len(q_TNH) * bool(self._num_decodes)
        if count:
            self._write_decode(layer, q_TNH[:count], out_TNH[:count])
        if count < len(q_TNH):
            self._write_prefill(layer, q_TNH[count:], out_TNH[count:])
