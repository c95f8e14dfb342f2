"""The order of heads with a value in GGUF files of Qwen3.5.

Legend: O outputs · I inputs, or their bytes
Owns: that order: the first one of each key, then the second one of each, and so on.  A model has those of a key
together.
Does not know: files, blocks.
"""

import torch
from torch import Tensor

from engine.checkpoints.shape import DecoderShape, GatedDeltaShape


class ValueHeads:
    """Heads of the gated delta rule.  Tensors of other parts stay as they are."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        self._shape = shape

    @classmethod
    def of(cls, shape: DecoderShape) -> "ValueHeads | None":
        """Return the heads of a model; None if they are in its order, as where each has a key of its own."""
        parts = [layer.recurrent for layer in shape.layers if isinstance(layer.recurrent, GatedDeltaShape)]
        return cls(parts[0]) if parts and parts[0].num_heads > parts[0].num_keys else None

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows, or numbers, of a tensor in the model's order.  Those of values are behind all others."""
        shape, part = self._shape, name.partition(f".{self._shape.name}.")[2].removesuffix(".weight")
        if part in ("", shape.norm, shape.outer[0]):
            return rows
        first = 2 * shape.num_keys * shape.key_size if part in ("in_proj_qkv", "conv1d") else 0
        size = (len(rows) - first) // shape.num_heads
        values = rows[first:].unflatten(0, (-1, shape.num_keys, size)).transpose(0, 1).flatten(0, 2)
        return torch.cat((rows[:first], values))

    def inputs(self, name: str, weight_OI: Tensor) -> Tensor:
        """Return a matrix with its inputs in the model's order."""
        if not self._reads_values(name):
            return weight_OI
        size = weight_OI.shape[1] // self._shape.num_heads
        return weight_OI.unflatten(1, (-1, self._shape.num_keys, size)).transpose(1, 2).flatten(1)

    def cuts(self, name: str, row_bytes: int, block_bytes: int) -> bool:
        """Return whether a block of a matrix has inputs of two heads.  block_bytes: 0 if not known."""
        of_heads = block_bytes * self._shape.num_heads
        return self._reads_values(name) and (not of_heads or bool(row_bytes % of_heads))

    def _reads_values(self, name: str) -> bool:
        return name.endswith(f".{self._shape.name}.{self._shape.outer[0]}.weight")
