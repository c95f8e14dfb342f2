"""One step's tensors, handed from the executor down through the model: no global holds them.

Legend: T new tokens in the step (ragged, packed) · R rotary size
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBackend


@dataclass(slots=True)
class StepTensors:
    """Inputs of ``model.forward``.

    token_ids_T, positions_T: int64.  slots_T: int64, where each token's K/V go (page * page_size + offset).
    sample_at_N: int64, the rows of T whose logits are wanted.
    attention has had ``begin`` called for this step; pool is where K/V are stored.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sample_at_N: Tensor
    attention: AttentionBackend
    pool: KVPool
