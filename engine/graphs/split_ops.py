"""Marks in a traced model: operations that do nothing and stand where the trace is to be split.

Legend: T rows of the run · N query heads · H head size
Owns: their names and signatures, as torch must know them to trace through.  Does not know: what is done in their place.
"""

import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch


@torch.library.custom_op("callboard::attend", mutates_args=("out",))
def _attend(q: Tensor, out: Tensor, layer: int) -> None:
    """Attention of a layer writes ``out``."""
    raise AssertionError("a mark was run: the traced model was not split here")


@torch.library.custom_op("callboard::all_reduce", mutates_args=("tensor",))
def _all_reduce(tensor: Tensor) -> None:
    """The sum over ranks, in place."""
    raise AssertionError("a mark was run: the traced model was not split here")


@_attend.register_fake
def _attend_traced(q: Tensor, out: Tensor, layer: int) -> None:
    return None


@_all_reduce.register_fake
def _all_reduce_traced(tensor: Tensor) -> None:
    return None


ATTEND = "callboard::attend"
ALL_REDUCE = "callboard::all_reduce"


class MarkedAttention:
    """See ``AttentionBackend``: puts a mark where each layer's attention belongs."""

    def plan_step(self, batch: AttentionBatch) -> None:
        """Nothing is planned for a trace."""

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """A result that the piece before allocates, and that whoever replaces the mark writes."""
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        torch.ops.callboard.attend(q_TNH, out_TNH, layer)
        return out_TNH
