"""Linear layers, cut over the tensor-parallel ranks; several checkpoint matrices can be merged into one product.

Legend: T new tokens in the step · I input features · O output features of this rank
  N rows whose logits are wanted · D model dim · V vocabulary
Owns: the cut, the merge, and ``pack``, the one place that lays a loaded weight out for the device.
Does not know: which model it is in, files.
Layers are plain objects: nn.Module's attribute lookups and calls cost 0.5 us each, a tenth of a small model's step.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import MatrixRows, share
from engine.layers.comm import Comm, NormingComm
from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.ordered_comm import OrderedComm
from engine.layers.packing import LinearKernel, PackedWeight, RowKeeper, RowWeight
from engine.layers.weights import WeightSlice, cut, parameter, part_slices


class Linear:
    """The product y = x W^T + b with this rank's part of W; every linear layer here is one."""

    def __init__(self, inputs: int, outputs: int, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.weight: Tensor = parameter(outputs, inputs, device=device, dtype=dtype)
        self.bias: Tensor | None = parameter(outputs, device=device, dtype=dtype) if bias else None
        self.packed: PackedWeight | None = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, self.bias)

    @property
    def nbytes(self) -> int:
        """Memory of the weight: in its kernel's layout, plain, or both if another object reads the plain one."""
        plain = self.weight.nbytes if hasattr(self, "weight") else 0
        return plain if self.packed is None else plain + self.packed.nbytes

    def pack(self, kernel: LinearKernel, keep_weight: bool = False) -> None:
        """Lay the weight out for its kernel; called once, after loading.

        The plain weight is freed if another layout replaces it, unless ``keep_weight`` says that its rows are still
        read, and they cannot be read in that layout.
        """
        self.packed = kernel.pack(self.weight)
        if self.packed is not None and not (keep_weight and not isinstance(self.packed, RowWeight)):
            del self.weight

    def adapt(self, adapted: Callable[[PackedWeight], PackedWeight]) -> None:
        """Replace the product by ``adapted(product)``, which adds to it; called once, after ``pack``."""
        self.packed = adapted(self.packed or PlainWeight(self.weight))

    def _product(self, x_TI: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is not None:
            return self.packed(x_TI, bias)
        return F.linear(x_TI, self.weight, bias)


class PlainWeight:
    """A weight as it was loaded; its memory is counted where it is kept."""

    nbytes = 0

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias (``PackedWeight``)."""
        return F.linear(x_TI, self._weight_OI, bias_O)


class ColumnLinear(Linear):
    """Outputs cut over ranks; x is whole on every rank.  Merges several matrices with one input.

    parts: rows over all ranks of each matrix, as (name, outputs) if the checkpoint has them alone.
    comm: None for no cut.
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[MatrixRows | tuple[str, int]],
        bias: bool,
        comm: Comm | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.parts = [cut(one if isinstance(one, MatrixRows) else MatrixRows(*one), comm) for one in parts]
        super().__init__(inputs, sum(length for *_, length in self.parts), bias, device, dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        yield from part_slices({"weight": self.weight, "bias": self.bias}, prefix, self.parts)


class QKVLinear(Linear):
    """Queries, keys and values in one product: [N + 2G, H] per token, cut over ranks by heads.  rows: over all ranks.

    With more ranks than key/value heads, neighbouring ranks hold copies of one head.
    """

    def __init__(
        self,
        inputs: int,
        rows: tuple[MatrixRows, MatrixRows, MatrixRows],
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_heads = share(num_heads, comm.size, "num_attention_heads")
        copies = max(1, comm.size // num_kv_heads)
        if copies > 1:
            share(comm.size, num_kv_heads, "tensor-parallel ranks over num_key_value_heads")
        self.num_kv_heads = share(num_kv_heads * copies, comm.size, "num_key_value_heads")
        queries = self.num_heads * head_size
        keys = self.num_kv_heads * head_size
        first_key = comm.rank // copies * keys
        of_queries, *others = rows
        self.parts = [(of_queries, comm.rank * queries, queries), *((one, first_key, keys) for one in others)]
        super().__init__(inputs, queries + 2 * keys, bias, device, dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        yield from part_slices({"weight": self.weight, "bias": self.bias}, prefix, self.parts)


class RowLinear(Linear):
    """A linear layer whose inputs are cut over ranks; every rank gets all outputs.

    The partial sums are added over ranks, and the bias once.  With an ``OrderedComm`` the outputs are cut instead and
    the inputs gathered, so that sums are those of a single rank."""

    may_cut_outputs = True

    def __init__(
        self, inputs: int, outputs: int, bias: bool, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.comm = comm
        self.inputs, self.outputs = inputs, outputs
        self._sums = comm.size > 1
        self.cuts_outputs = self.may_cut_outputs and isinstance(comm, OrderedComm)
        mine = share(inputs, comm.size, "input features")
        if self.cuts_outputs:
            super().__init__(inputs, share(outputs, comm.size, "output features"), bias, device, dtype)
        else:
            super().__init__(mine, outputs, bias, device, dtype)

    @property
    def inputs_of_rank(self) -> int:
        """Number of input features that this rank passes."""
        return self.inputs // self.comm.size

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self._sums:
            return self._product(x_TI, self.bias)
        if self.cuts_outputs:
            return self.comm.all_gather(self._product(self.comm.all_gather(x_TI), self.bias))
        y_TO = self.comm.all_reduce(self._product(x_TI, None))
        return y_TO if self.bias is None else y_TO.add_(self.bias)

    def leave_sum(self) -> NormingComm | None:
        """Return this rank's summand from now on (``SumLeaver``)."""
        comm = leavable(self.comm)
        if comm is None or self.cuts_outputs or self.bias is not None:
            return None
        self._sums = False
        return comm

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        cut = 0 if self.cuts_outputs else 1
        mine = self.weight.shape[cut]
        first, sizes = self.comm.rank * mine, (self.outputs, self.inputs)
        yield WeightSlice(f"{prefix}.weight", sizes, cut, first, mine, self.weight)
        if self.bias is not None:
            start = first if self.cuts_outputs else 0
            yield WeightSlice(f"{prefix}.bias", (self.outputs,), 0, start, len(self.bias), self.bias)


def leavable(comm: Comm) -> NormingComm | None:
    """Return the group if a norm may sum over its ranks."""
    return comm if comm.size > 1 and isinstance(comm, NormingComm) and comm.norms else None


class VocabLinear(Linear):
    """A table of one row per token id.  MatrixRows are padded with zeros up to a multiple of the number of ranks.

    The embedding and the LM head are such tables, and with tied weights the same object.
    """

    def __init__(self, vocab_size: int, size: int, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        rows = -(-vocab_size // comm.size)
        super().__init__(size, rows, bias=False, device=device, dtype=dtype)
        self.comm = comm
        self.vocab_size = vocab_size
        self.first = comm.rank * rows
        self.rows = rows

    def pack_kept(self, kernel: LinearKernel) -> None:
        """Lay out a table whose rows the kernel has taken as they are stored; another one stays plain."""
        if isinstance(kernel, RowKeeper) and kernel.keeps(self.weight):
            self.pack(kernel)

    def embed(self, token_ids_T: Tensor, kernels: LayerKernels | None = None) -> Tensor:
        """Return the hidden states of token ids, which must be in the vocabulary."""
        if self.comm.size == 1:
            return self._rows(token_ids_T)
        if isinstance(kernels, DeviceKernels):
            return self.comm.all_reduce(kernels.embed_shard(token_ids_T, self.weight, self.first))
        local_T = token_ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.rows)
        x_TD = self._rows(local_T.masked_fill(elsewhere_T, 0))
        return self.comm.all_reduce(x_TD.masked_fill_(elsewhere_T[:, None], 0))

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        if hasattr(self, "weight"):
            return F.embedding(token_ids_T, self.weight)
        assert isinstance(self.packed, RowWeight), "the plain table was freed"
        return self.packed.rows(token_ids_T)

    def logits(self, x_ND: Tensor, as_float32: bool = True) -> Tensor:
        """Return logits_NV, whole on every rank: as float32, or in the model's dtype, as exact in half the memory."""
        logits_NV = self(x_ND)
        if self.comm.size > 1:
            logits_NV = self.comm.all_gather(logits_NV)[:, : self.vocab_size]
        return logits_NV.float() if as_float32 else logits_NV

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        first = min(self.first, self.vocab_size)
        held = min(self.rows, self.vocab_size - first)
        yield WeightSlice(f"{prefix}.weight", (self.vocab_size, self.weight.shape[1]), 0, first, held, self.weight)
