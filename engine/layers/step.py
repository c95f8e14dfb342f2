"""One step's tensors, passed from the executor down through the model; no global holds them.

Legend: T new tokens in the step (ragged, packed) · B decode rows of a batch, padding included · W pages of its table
        D model dim
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.layers.attention import AttentionBackend
from engine.layers.kv_pool import KVPool
from engine.layers.states import StatesOfStep

BEHIND = -(1 << 30)  # and a distance, in place of a position: so far behind the length that the device has of the row


@dataclass(slots=True)
class StepTensors:
    """Inputs of ``model.forward``.

    token_ids_T, positions_T: int64; the second is [3, T] where a step has positions with three axes.
    slots_T: int64, the slot of each token's K/V (page * pool.page_stride + offset).
    sample_at_N: int64, the rows of T whose logits are wanted.
    attention: backend whose ``plan_step`` has been called for this step.
    pool: where K/V are stored.
    states: of recurrent layers; None for a model without them.
    inserts: what replaces embeddings of tokens; None for nothing.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sample_at_N: Tensor
    attention: AttentionBackend
    pool: KVPool
    states: StatesOfStep | None = None
    inserts: "Inserts | None" = None


class Inserts(Protocol):
    """Rows of a step that do not come from the embedding of tokens."""

    def embed(self, x_TD: Tensor) -> Tensor:
        """Return the input of the first layer, with these rows in place of their tokens' embeddings."""
        ...

    def behind(self, layer: int, update_TD: Tensor) -> Tensor:
        """Return the result of a layer with what is added to it.  update: a result with [T, K, D] is summed."""
        ...


class StateTap(Protocol):
    """A reader of the hidden states of every token that a model computes.

    layers: those whose inputs it reads; the number of all layers for the result of the last one."""

    layers: Collection[int]

    def keep(self, states: Sequence[Tensor], step: StepTensors) -> None:
        """Keep some of the states.  states: x_TD for each of ``layers``, in their order, not to be changed."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a decode batch: new tensors, or the static ones of a captured step.

    token_ids_B, positions_B, slots_B, write_at_B: int64.
    write_at_B: index in the flat token table for the sampled token; -1 for padding.
    lengths_B: int32, the new token included.
    page_table_BW: int32, 0 after a sequence's last page; padding rows have the dump page.
    """

    token_ids_B: Tensor
    positions_B: Tensor
    slots_B: Tensor
    write_at_B: Tensor
    lengths_B: Tensor
    page_table_BW: Tensor
