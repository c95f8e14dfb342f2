"""The vocabulary's two ends, cut over ranks by rows: token ids to hidden states, hidden states to logits.

Legend: T new tokens in the step · N rows whose logits are wanted · D model dim · V vocabulary
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear
from engine.layers.weights import WeightSlice


class VocabLinear(Linear):
    """A table of one row per token id.  Rows are padded with zeros up to a multiple of the number of ranks.

    The embedding and the LM head are the same kind of table, and with tied weights the same object.
    """

    def __init__(self, vocab_size: int, size: int, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        rows = -(-vocab_size // comm.size)
        super().__init__(size, rows, bias=False, device=device, dtype=dtype)
        self.comm = comm
        self.vocab_size = vocab_size
        self.first = comm.rank * rows
        self.rows = rows

    def embed(self, token_ids_T: Tensor, kernels: LayerKernels | None = None) -> Tensor:
        """Hidden states of token ids; ids below 0 or past the vocabulary are a bug of the caller."""
        if self.comm.size == 1:
            return F.embedding(token_ids_T, self.weight)
        if kernels is not None:
            return self.comm.all_reduce(kernels.embed_shard(token_ids_T, self.weight, self.first))
        local_T = token_ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.rows)
        x_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.comm.all_reduce(x_TD.masked_fill_(elsewhere_T[:, None], 0))

    def logits(self, x_ND: Tensor, as_float32: bool = True) -> Tensor:
        """Logits_NV, whole on every rank; in float32, or in the model's dtype, half the memory and as exact."""
        logits_NV = self(x_ND)
        if self.comm.size > 1:
            logits_NV = self.comm.all_gather(logits_NV)[:, : self.vocab_size]
        return logits_NV.float() if as_float32 else logits_NV

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this layer reads from a checkpoint."""
        first = min(self.first, self.vocab_size)
        held = min(self.rows, self.vocab_size - first)
        yield WeightSlice(f"{prefix}.weight", (self.vocab_size, self.weight.shape[1]), 0, first, held, self.weight)
