"""Weights of a GGUF file as float32.

Legend: O outputs · I inputs · H head size
Owns: the numbers and their order.  Does not know: which tensors a model needs, how blocks are stored.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.gguf import LINK, open_gguf, read_tensors
from engine.checkpoints.shards import StoredTensor
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

# For these families llama.cpp's converter reorders the rows of queries and keys: pairs that rotate become neighbours.
PAIRED = ("LlamaForCausalLM", "MistralForCausalLM")


class GGUFWeights:
    """Tensors of a GGUF file.  If rows allow it, only the blocks of a requested part are decoded."""

    def __init__(self, spec: ModelSpec) -> None:
        self._path = spec.directory / LINK
        self._heads = {"q_proj": spec.shape.num_heads, "k_proj": spec.shape.num_kv_heads}
        if spec.architecture not in PAIRED:
            self._heads = {}
        self._found: dict[str, tuple[StoredTensor, Any]] = read_tensors(self._path, open_gguf(self._path))
        self.tensors = {name: tensor for name, (tensor, _) in self._found.items()}

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return a part of a tensor.  No family that is read from GGUF files has stacks."""
        from gguf.quants import dequantize

        _, source = self._found[name]
        heads = self._heads.get(name.split(".")[-2], 0)
        whole = dim != 0 or heads
        try:
            data = source.data if whole else source.data[start : start + length]
            with np.errstate(all="ignore"):  # the loader refuses NaN and infinity
                # A copy: plain numbers are returned as the mapped file, which cannot be written.
                weight = torch.from_numpy(np.array(dequantize(data, source.tensor_type), dtype=np.float32))
        except (NotImplementedError, ValueError) as error:
            kind = source.tensor_type.name
            raise WeightsError(f"{self._path}: tensor {source.name!r} of type {kind} cannot be read: {error}") from None
        if heads:
            weight = _unpaired(weight, heads)
        return weight.narrow(dim, start, length) if whole else weight

    def rows(self, name: str, dim: int, start: int, length: int) -> StoredRows | None:
        """Return rows of blocks, in the model's order; None for a type without blocks, and for a part of the inputs."""
        stored, source = self._found[name]
        if len(stored.shape) != 2 or source.data.dtype != np.uint8 or (dim and length != stored.shape[1]):
            return None
        blocks = torch.from_numpy(np.array(source.data))
        if heads := self._heads.get(name.split(".")[-2], 0):
            blocks = _unpaired(blocks, heads)
        where = f"{self._path}: tensor {name!r}"
        return StoredRows(
            where, source.tensor_type.name, blocks if dim else blocks[start : start + length], stored.shape[1]
        )

    def close(self) -> None:
        self._found.clear()


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of each head, stored as (0 H/2 1 H/2+1 ...), in their own order."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
