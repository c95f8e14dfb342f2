"""A mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated MLPs.

Legend: T new tokens in the step · D model dim · E experts · K experts of a token · P pairs of token and expert, T K
Owns: routing, and one product for each expert that has tokens.  Does not know: which model it is in, files.
Every rank has a part of every expert, as it has of a dense MLP.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.checkpoints.shape import ExpertsShape
from engine.errors import ConfigError
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, RowLinear
from engine.layers.mlp import clamped_swish, gated
from engine.layers.weights import WeightSlice, joined, transposed, whole


class PartialLinear(RowLinear):
    """This rank's part of the sum that ``RowLinear`` makes: it is added up over ranks once, for all experts."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, self.bias if self.comm.rank == 0 else None)


class Expert:
    """One gated MLP, whose result is a partial sum."""

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        size, bias = shape.expert_size, shape.stacked
        parts = [("gate_up_proj", 2 * size)] if shape.stacked else [(shape.gate, size), (shape.up, size)]
        self.shape = shape
        self.gate_up = ColumnLinear(hidden_size, parts, bias, comm, device, dtype)
        self.down = PartialLinear(size, hidden_size, bias, comm, device, dtype)

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up(x_TD)
        if self.shape.stacked:
            return self.down(clamped_swish(gate_up, self.shape.limit, self.shape.slope))
        return self.down(gated(gate_up, self.shape.activation, None))


class Experts:
    """The sum over a token's experts of weight * expert(x).

    The router is none of ``linears``: it is small, and rounding it would send tokens to other experts."""

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        if device.type == "cuda":
            raise ConfigError("a mixture of experts runs on CPUs only so far; set device.kind=cpu")
        self.shape = shape
        self.comm = comm
        self.router = Linear(hidden_size, shape.num_experts, shape.router_bias, device, dtype)
        self.experts = [Expert(shape, hidden_size, comm, device, dtype) for _ in range(shape.num_experts)]
        self.linears = [linear for expert in self.experts for linear in (expert.gate_up, expert.down)]

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        weights_TK, experts_TK = self._route(x_TD)
        # Pairs by expert, of each expert in the order of tokens: what a token gets is added up in the experts' order,
        # whatever else is in the batch.
        order_P = experts_TK.flatten().argsort(stable=True)
        tokens_P = order_P // self.shape.num_chosen
        weights_P1 = weights_TK.flatten()[order_P][:, None]
        counts = experts_TK.flatten().bincount(minlength=self.shape.num_experts).tolist()
        out_TD = torch.zeros_like(x_TD)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                pairs = slice(first, first + count)
                rows = tokens_P[pairs]
                out_TD.index_add_(0, rows, expert(x_TD.index_select(0, rows)).mul_(weights_P1[pairs]))
                first += count
        return self.comm.all_reduce(out_TD) if self.comm.size > 1 else out_TD

    def pack(self, kernels: LayerKernels | None) -> None:
        """Nothing to prepare beside the linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this part reads from a checkpoint."""
        shape = self.shape
        name = joined(prefix, shape.name)
        yield whole(f"{name}.{shape.router}.weight", self.router.weight)
        if self.router.bias is not None:
            yield whole(f"{name}.{shape.router}.bias", self.router.bias)
        for number, expert in enumerate(self.experts):
            if shape.stacked:
                yield from self._members(f"{name}.experts", number, expert)
            else:
                yield from expert.gate_up.slices(f"{name}.experts.{number}")
                yield from expert.down.slices(f"{name}.experts.{number}.{shape.down}")

    def _members(self, name: str, number: int, expert: Expert) -> Iterator[WeightSlice]:
        slices = [*expert.gate_up.slices(name), *expert.down.slices(f"{name}.down_proj")]
        for one in transposed(slices):
            source = one.source.removesuffix(".weight").replace(".bias", "_bias")
            yield replace(one, source=source, member=number, num_members=len(self.experts))

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """weights_TK in x's dtype, experts_TK."""
        scores_TE = self.router(x_TD).float()
        if self.shape.normalised:
            scores_TK, experts_TK = scores_TE.topk(self.shape.num_chosen, -1)
            return scores_TK.softmax(-1).to(x_TD.dtype), experts_TK
        weights_TK, experts_TK = scores_TE.softmax(-1).topk(self.shape.num_chosen, -1)
        return weights_TK.to(x_TD.dtype), experts_TK
