"""Weights of a GGUF file, each block as the float32 numbers that it stands for.

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
from engine.types.errors import WeightsError

# Of these families llama.cpp's converter moves the rows of queries and keys, so that pairs that rotate lie together.
PAIRED = ("LlamaForCausalLM", "MistralForCausalLM")


class GGUFWeights:
    """Tensors of a file.  A part of one is cut out before its blocks are turned into numbers, where rows allow it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._path = spec.directory / LINK
        self._heads = {"q_proj": spec.shape.num_heads, "k_proj": spec.shape.num_kv_heads}
        if spec.architecture not in PAIRED:
            self._heads = {}
        self._found: dict[str, tuple[StoredTensor, Any]] = read_tensors(self._path, open_gguf(self._path))
        self.tensors = {name: tensor for name, (tensor, _) in self._found.items()}

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """See ``WeightReader.part``.  No family that is read from GGUF files has stacks."""
        from gguf.quants import dequantize

        _, source = self._found[name]
        heads = self._heads.get(name.split(".")[-2], 0)
        whole = dim != 0 or heads
        try:
            data = source.data if whole else source.data[start : start + length]
            with np.errstate(all="ignore"):  # the loader refuses what is no number
                # A copy: what is no block of numbers is given as the mapped file, which cannot be written.
                weight = torch.from_numpy(np.array(dequantize(data, source.tensor_type), dtype=np.float32))
        except (NotImplementedError, ValueError) as error:
            kind = source.tensor_type.name
            raise WeightsError(f"{self._path}: tensor {source.name!r} of type {kind} cannot be read: {error}") from None
        if heads:
            weight = _unpaired(weight, heads)
        return weight.narrow(dim, start, length) if whole else weight

    def close(self) -> None:
        self._found.clear()


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """Rows (0 1 2 3 ...) of each head, which are its (0 H/2 1 H/2+1 ...), back in their own order."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
