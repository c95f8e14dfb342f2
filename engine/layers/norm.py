"""Normalisation of hidden states and of attention heads.

Legend: T new tokens in the step · D model dim · A query and key heads · Q query heads · H head size
Owns: the formulas and their fast form on a CPU.  Does not know: which model they are in.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import LayerNormShape, PartShape, RenewingShape, RMSNormShape, Scaling
from engine.layers.comm import Comm
from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.weights import WeightSlice, joined, parameter, whole


class UnchangedNorm:
    """A norm that returns its input."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Add ``update`` to x in place and return x."""
        return x_TD if update_TD is None else x_TD.add_(update_TD)

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Do nothing."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield nothing: there is no weight."""
        yield from ()


class Scaled(UnchangedNorm):
    """A product x * factor, in place: only after attention and MLPs, whose results nothing else reads."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x_TD: Tensor) -> Tensor:
        return x_TD.mul_(self.factor)


class RMSNorm:
    """The norm x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, with the mean in float32.

    A weight with an offset is kept in float32: bfloat16 would round the sum of the two."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        offset: float = 0.0,
        name: str = "",
        rows: tuple[int, ...] = (),
    ) -> None:
        """Allocate the weight.  name: its name below the prefix of ``slices``.  rows: number of weights, for heads."""
        self.eps = eps
        self.size = size
        self.offset = offset
        self.name = name
        self.weight = parameter(*rows, size, device=device, dtype=torch.float32 if offset else dtype)
        self._mixed = self.weight.dtype != dtype
        self._by_length: tuple[Tensor, Tensor] | None = None
        self._alone = False  # whether kernels also compute a norm that has nothing to add

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self._by_length is not None:
            return self._divide_by_length(x_TD, *self._by_length)
        if self._mixed:
            return (F.rms_norm(x_TD.float(), (self.size,), None, self.eps) * self.weight).to(x_TD.dtype)
        return self._plain(x_TD)

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        if kernels is not None and (update_TD is not None or self._alone):
            return kernels.add_norm(x_TD, update_TD, self.weight, self.eps)
        return self(x_TD if update_TD is None else x_TD.add_(update_TD))

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Prepare for the device; called once, after loading.  Kernels read the weight as it is.

        On a CPU torch computes the formula in seven small operations.  Written with the vector's length,
        x / hypot(|x|, sqrt(D eps)) * (weight sqrt(D)), it takes four and 1.3 to 1.9 times less time.
        """
        self._alone = not isinstance(kernels, DeviceKernels)
        if self.offset:
            self.weight.add_(self.offset)
        is_plain = self.weight.dtype == torch.float32 and not self._mixed
        if self.weight.device.type == "cpu" and is_plain:
            floor = torch.tensor(math.sqrt(self.size * self.eps))
            self._by_length = (floor, self.weight * math.sqrt(self.size))

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield whole(joined(joined(prefix, self.name), "weight"), self.weight)

    def _plain(self, x_TD: Tensor) -> Tensor:
        return F.rms_norm(x_TD, (self.size,), self.weight, self.eps)

    def _divide_by_length(self, x: Tensor, floor: Tensor, weight: Tensor) -> Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
        return torch.div(x, length).mul_(weight)


class RenewingNorm:
    """A norm whose result, times a factor, takes the place of x."""

    def __init__(self, norm: RMSNorm, factor: float) -> None:
        self._norm = norm
        self._factor = factor

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._norm(x_TD)

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        """Return the norm of the sum of x and ``update``, and write it, times the factor, over x."""
        normed_TD = self._norm.added(x_TD, update_TD, kernels)
        torch.mul(normed_TD, self._factor, out=x_TD)
        return normed_TD

    def pack(self, kernels: LayerKernels | None = None) -> None:
        self._norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        return self._norm.slices(prefix)


class LayerNorm:
    """The norm (x - mean) / sqrt(variance + eps) * (offset + weight) + bias over the last dimension."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        name: str = "",
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.size = size
        self.eps = eps
        self.name = name
        self.offset = offset
        self.weight = parameter(size, device=device, dtype=dtype)
        self.bias = parameter(size, device=device, dtype=dtype) if bias else None

    def __call__(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, (self.size,), self.weight, self.bias, self.eps)

    def added(self, x_TD: Tensor, update_TD: Tensor | None, kernels: LayerKernels | None) -> Tensor:
        return self(x_TD if update_TD is None else x_TD.add_(update_TD))

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Add the offset to the weight; torch computes the rest in one operation."""
        if self.offset:
            self.weight.add_(self.offset)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.name)
        yield whole(f"{name}.weight", self.weight)
        if self.bias is not None:
            yield whole(f"{name}.bias", self.bias)


class HeadNorm(RMSNorm):
    """RMSNorm over each query and key head, in one call: ``weight`` repeats the two weights for the heads."""

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        size: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        offset: float = 0.0,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        super().__init__(size, eps, device, dtype, offset=offset, rows=(num_queries + num_keys,))
        self.num_queries = num_queries
        self.names = names

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        for head, weight_H in enumerate(self.weight):
            yield whole(f"{prefix}.{self.names[head >= self.num_queries]}.weight", weight_H)

    def _plain(self, x_TD: Tensor) -> Tensor:
        return F.rms_norm(x_TD, (self.size,), None, self.eps) * self.weight


class HeadLength(HeadNorm):
    """HeadNorm whose weights are all 1, and not stored."""

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Prepare for the device; called once, after loading."""
        self.weight.fill_(1.0)
        super().pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield nothing: there is no weight."""
        yield from ()


class WideHeadNorm:
    """RMSNorm over all query heads together and over all key heads together; squares are summed over ranks."""

    def __init__(
        self,
        counts: tuple[int, int],
        totals: tuple[int, int],
        size: int,
        eps: float,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the weights.  counts: (query heads, key heads) of this rank.  totals: the same over all ranks."""
        self.eps = eps
        self.comm = comm
        self.size = size
        self.counts = counts
        self.totals = totals
        self.weight = parameter(sum(counts), size, device=device, dtype=dtype)

    def __call__(self, x_TAH: Tensor) -> Tensor:
        queries = self.counts[0]
        squares_TA = x_TAH.float().square().sum(-1)
        sums_T2 = torch.stack((squares_TA[:, :queries].sum(-1), squares_TA[:, queries:].sum(-1)), -1)
        if self.comm.size > 1:
            sums_T2 = self.comm.all_reduce(sums_T2)
        # Each rank that holds a copy of a key head has counted it.
        widths = [count * self.comm.size * self.size for count in self.counts]
        roots = [torch.rsqrt(sums_T2[:, side] / width + self.eps) for side, width in enumerate(widths)]
        scale_TA = torch.cat([root[:, None].expand(-1, n) for root, n in zip(roots, self.counts, strict=True)], -1)
        return (x_TAH.float() * scale_TA[..., None]).to(x_TAH.dtype) * self.weight

    def pack(self, kernels: LayerKernels | None = None) -> None:
        """Do nothing."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        first = 0
        for name, count, total in zip(("q_norm", "k_norm"), self.counts, self.totals, strict=True):
            copies = max(1, count * self.comm.size // total)
            start = self.comm.rank // copies * count * self.size
            target = self.weight[first : first + count].view(-1)
            yield WeightSlice(f"{prefix}.{name}.weight", (total * self.size,), 0, start, count * self.size, target)
            first += count


class HeadLayerNorm(WideHeadNorm):
    """LayerNorm over each head, in float32, with a weight per head and no bias."""

    def __call__(self, x_TAH: Tensor) -> Tensor:
        return (F.layer_norm(x_TAH.float(), (self.size,), None, None, self.eps) * self.weight).to(x_TAH.dtype)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield ``WideHeadNorm``'s slices as [heads, H], where that has all heads in one dimension."""
        for one in super().slices(prefix):
            heads = one.target.view(-1, self.size)
            shape = (one.shape[0] // self.size, self.size)
            yield WeightSlice(one.source, shape, 0, one.start // self.size, len(heads), heads)


def unchanged(shape: PartShape, *_: object) -> UnchangedNorm:
    """Build the layer of ``engine.checkpoints.shape.Unchanged``."""
    return UnchangedNorm()


def scaled(shape: Scaling, *_: object) -> Scaled:
    """Build the layer of a ``Scaling``."""
    return Scaled(shape.factor)


def renewing(
    shape: RenewingShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
) -> RenewingNorm:
    """Build the layer of a ``RenewingShape``."""
    return RenewingNorm(rms_norm(shape.norm, hidden_size, comm, device, dtype), shape.factor)


def rms_norm(shape: RMSNormShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype) -> RMSNorm:
    """Build the layer of an ``RMSNormShape``."""
    return RMSNorm(hidden_size, shape.eps, device, dtype, offset=shape.offset, name=shape.name)


def layer_norm(
    shape: LayerNormShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
) -> LayerNorm:
    """Build the layer of a ``LayerNormShape``."""
    return LayerNorm(hidden_size, shape.eps, device, dtype, name=shape.name, bias=shape.bias, offset=shape.offset)
