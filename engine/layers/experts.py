"""A mixture of experts (Shazeer et al. 2017): a router sends each token to a few of many gated MLPs.

Legend: T new tokens in the step · D model dim · E experts · K experts of a token · P pairs of token and expert, T K
        O outputs of gate and up on this rank · I intermediate features of this rank
Owns: one product for each expert that has tokens, and the stacked weights of all experts, for a kernel that computes
them in one launch.  Does not know: how experts are chosen, which model it is in, files.
Every rank has either a part of every expert, as of a dense MLP, or some whole experts.  Each rank computes its share
for all tokens, and the shares are summed over ranks; those of whole experts perhaps by an exchange (``exchange.py``).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.checkpoints.shape import ExpertsShape
from engine.layers.comm import Comm, ExchangingComm, NormingComm, Unconnected
from engine.layers.exchange import exchanged_sum
from engine.layers.float8_experts import EightBits, StoredFloat8
from engine.layers.four_bits import FourBits, StoredCodes
from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.linear import ColumnLinear, Linear, RowLinear, leavable
from engine.layers.mlp import GatedMLP, activated, activated_by_rows, clamped_swish, gated
from engine.layers.router import Router
from engine.layers.weights import WeightSlice, joined, merged, not_here, parameter, transposed, whole
from engine.types.errors import ConfigError


class PartialLinear(RowLinear):
    """This rank's partial sum of a ``RowLinear``: ``Experts`` sums over ranks once, for all experts."""

    may_cut_outputs = False

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, self.bias if self.comm.rank == 0 else None)


class Expert:
    """One gated MLP, whose result is a partial sum.  size: intermediate features over all ranks."""

    def __init__(
        self, shape: ExpertsShape, size: int, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        bias = self.alternating = shape.activation == "clamped_swish"
        parts = [("gate_up_proj", 2 * size)] if bias else [(one, size) for one in (shape.gate, shape.up) if one]
        self.shape = shape
        self.gate_up = ColumnLinear(hidden_size, parts, bias, comm, device, dtype)
        self.down = PartialLinear(size, hidden_size, bias, comm, device, dtype)
        self.linears = (self.gate_up, self.down)
        self._activate = activated

    def by_rows(self) -> None:
        """Compute the activation by rows (``RowwisePart``)."""
        self._activate = activated_by_rows

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None = None) -> Tensor:
        gate_up = self.gate_up(x_TD)
        if self.shape.activation == "clamped_swish":
            return self.down(clamped_swish(gate_up, self.shape.limit, self.shape.slope, self._activate))
        if not self.shape.gate:
            return self.down(self._activate(gate_up, self.shape.activation))
        return self.down(gated(gate_up, self.shape.activation, kernels, self._activate))

    def slices(self, name: str) -> Iterator[WeightSlice]:
        """Yield the slices of a checkpoint that has this expert in its own tensors."""
        for one in self.gate_up.slices(name):
            yield from self._sides(name, one) if self.alternating else (one,)
        yield from self.down.slices(f"{name}.{self.shape.down}")

    def _sides(self, name: str, both: WeightSlice) -> Iterator[WeightSlice]:
        """Yield the slices of gate and up that are stored apart, where one tensor has their rows in turns."""
        kind = both.source.rpartition(".")[2]
        for side, own in enumerate((self.shape.gate, self.shape.up)):
            shape, target = (both.shape[0] // 2, *both.shape[1:]), both.target[side::2]
            yield WeightSlice(f"{name}.{own}.{kind}", shape, 0, both.start // 2, len(target), target)


class Experts:
    """The sum over a token's experts of weight * expert(x), plus a shared expert for all tokens if the model has one.

    On a GPU one kernel reads all experts' weights, and ``linears`` leaves them out, so they are not rounded there.
    Experts of other ranks have no memory here."""

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.comm = comm
        self._sums = comm.size > 1
        self._exchanging = comm if shape.exchanged and isinstance(comm, ExchangingComm) else None
        self._adds = True  # a token's results
        self.router = Router(shape.router, hidden_size, shape.num_experts, shape.num_chosen, device, dtype)
        place = (hidden_size, comm, device, dtype)
        self.shared = Expert(shape, shape.shared_size, *place) if shape.shared_size else None
        self.shared_gate = Linear(hidden_size, 1, False, device, dtype) if shape.shared_gate else None
        self.beside = None if shape.beside is None else GatedMLP(shape.beside, *place)
        nowhere, cut = torch.device("meta"), Unconnected(0, 1) if shape.divided else comm
        self.every = [
            Expert(shape, shape.expert_size, hidden_size, cut, nowhere, dtype) for _ in range(shape.num_experts)
        ]
        self.first, end = _held(shape, comm)
        self.experts = self.every[self.first : end]
        self._ends_R = torch.tensor([_held(shape, Unconnected(one, comm.size))[1] for one in range(comm.size)]).to(
            device
        )
        pairs = zip(*(expert.linears for expert in self.experts), strict=True)
        self._stacks = [Stack(linears, device, shape) for linears in pairs]
        self.on_gpu = device.type == "cuda"
        routed = [] if self.on_gpu else [linear for expert in self.experts for linear in expert.linears]
        others = [one for one in (self.shared, self.beside) if one is not None]
        self.linears = [*routed, *(linear for one in others for linear in one.linears)]
        self.exacts = [self.router.linear] if self.shared_gate is None else [self.router.linear, self.shared_gate]
        self._kernels: DeviceKernels | None = None
        self._activate = activated

    def by_rows(self) -> None:
        """Compute activations and the router's choice by rows (``RowwisePart``)."""
        self._activate = activated_by_rows
        for part in (self.router, self.shared, self.beside, *self.experts):
            if part is not None:
                part.by_rows()

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.mixed(x_TD, *self.router(x_TD, self._kernels), kernels)

    def mixed(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Return the sum over the chosen experts, and what is for all tokens."""
        if self.shape.weighs_inputs:
            out_TD, ones_T1 = torch.zeros_like(x_TD), weights_TK.new_ones((len(x_TD), 1))
            for weight_T1, expert_T1 in zip(weights_TK.split(1, 1), experts_TK.split(1, 1), strict=True):
                out_TD += self._result(x_TD * weight_T1, ones_T1, expert_T1.contiguous())
        else:
            out_TD = self._result(x_TD, weights_TK, experts_TK)
        if self.shared is not None:
            shared_TD = self.shared(x_TD, kernels)
            if self.shared_gate is not None:
                shared_TD *= self._activate(self.shared_gate(x_TD), "sigmoid")
            out_TD += shared_TD
        if self._sums:
            out_TD = self._summed(out_TD, experts_TK)
        return out_TD if self.beside is None else out_TD.add_(self.beside(x_TD, kernels))

    def _summed(self, part_TD: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the sum of all ranks' parts."""
        comm = self._exchanging
        if comm is None or not comm.exchanges:
            return self.comm.all_reduce(part_TD)
        return exchanged_sum(comm, part_TD, torch.bucketize(experts_TK, self._ends_R, right=True))

    def leave_sum(self) -> NormingComm | None:
        """Return this rank's summand from now on (``SumLeaver``)."""
        comm = leavable(self.comm)
        if comm is None or self.beside is not None or self._exchanging is not None:
            return None
        self._sums = False
        return comm

    def leave_parts(self) -> bool:
        """Return what a token's experts give, [T, K, D], from now on (``PartsLeaver``)."""
        others = self.shared, self.beside
        self._adds = self._kernels is None or self._sums or self.shape.weighs_inputs or others != (None, None)
        return not self._adds

    def _result(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._mixed_by(self._kernels, x_TD, weights_TK, experts_TK)
        return self._mixed(x_TD, weights_TK, experts_TK)

    def _mixed_by(self, kernels: DeviceKernels, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return what ``_mixed`` returns, computed without reading the choice on the host, as a graph needs it."""
        shape, (gate_up, down) = self.shape, self._stacks
        biases = (gate_up.biases, down.biases if shape.divided or self.comm.rank == 0 else None)
        weights, first = (gate_up.weights, down.weights), self.first if shape.divided else None
        return kernels.mix_experts(
            x_TD, weights_TK, experts_TK, *weights, *biases, shape.activation, shape.limit, shape.slope, first,
            self._adds,
        )  # fmt: skip

    def _mixed(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return this rank's part of the sum over the chosen experts, computed expert by expert."""
        # Pairs are sorted by expert, then by token, so a token's results are added in the order of experts, whatever
        # else is in the batch.
        order_P = experts_TK.flatten().argsort(stable=True)
        tokens_P = order_P // experts_TK.shape[1]
        weights_P1 = weights_TK.flatten()[order_P][:, None]
        counts = experts_TK.flatten().bincount(minlength=self.shape.num_experts).tolist()
        out_TD = torch.zeros_like(x_TD)
        first = sum(counts[: self.first])
        for expert, count in zip(self.experts, counts[self.first :], strict=False):
            if count:
                pairs = slice(first, first + count)
                rows = tokens_P[pairs]
                out_TD.index_add_(0, rows, expert(x_TD.index_select(0, rows)).mul_(weights_P1[pairs]))
                first += count
        return out_TD

    def pack(self, kernels: LayerKernels | None) -> None:
        """Set the GPU's kernel; called once, after loading.  Raises ConfigError on a GPU without kernels."""
        if not self.on_gpu:
            self._stacks = []  # each expert has its own layout by now
        elif not self.shape.gate:
            raise ConfigError("a mixture of experts without gates runs on CPUs alone; set device.kind=cpu")
        elif not isinstance(kernels, DeviceKernels):
            raise ConfigError(
                "a mixture of experts on a GPU needs this project's Triton kernels, which cannot be used here; the log "
                "says why; install triton, unset CALLBOARD_KERNELS, or set device.kind=cpu"
            )
        else:
            self._kernels = kernels
            for stack in self._stacks:
                stack.pack()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this part reads."""
        shape = self.shape
        name = joined(prefix, shape.name)
        yield from self.router.slices(name)
        for number, expert in enumerate(self.every):
            own = f"{name}.experts.{number}"
            slices = self._members(name, number, expert) if shape.stacked else self._single(own, number, expert)
            held = self.first <= number < self.first + len(self.experts)
            yield from slices if held else not_here(slices)
        if self.shared is not None:
            yield from self.shared.slices(f"{name}.{shape.shared}")
        if self.beside is not None:
            yield from self.beside.slices(prefix)
        if self.shared_gate is not None:
            yield whole(f"{name}.{shape.shared_gate}.weight", self.shared_gate.weight)

    def _single(self, own: str, number: int, expert: Expert) -> Iterator[WeightSlice]:
        """Yield the slices of a checkpoint that has each expert in its own tensors."""
        if not self.shape.float8:
            yield from expert.slices(own)
            return
        products = (expert.gate_up.slices(own), expert.down.slices(f"{own}.{self.shape.down}"))
        for memory, product in zip(self._stacks, products, strict=True):
            yield from memory.stored(product, self._place(number))

    def _place(self, number: int) -> int:
        """Return the place of an expert in the stacks; any, for an expert of another rank."""
        return min(max(0, number - self.first), len(self.experts) - 1)

    def _members(self, name: str, number: int, expert: Expert) -> Iterator[WeightSlice]:
        products = (expert.gate_up.slices(""), expert.down.slices(""))
        for memory, stack, product in zip(self._stacks, self.shape.stacks, products, strict=True):
            slices = merged(product, f"{name}.{stack}")
            if self.shape.four_bits:
                slices = memory.stored(slices, self._place(number))
            elif not self.shape.upright:
                slices = transposed(slices)
            for one in slices:
                source = one.source.removesuffix(".weight").replace(".bias", "_bias")
                yield replace(one, source=source, member=number, num_members=len(self.every))


def _held(shape: ExpertsShape, comm: Comm) -> tuple[int, int]:
    """Return this rank's range of experts as (first, end); the first ranks may have one more."""
    total = shape.num_experts
    if not shape.divided:
        return 0, total
    if total < comm.size:
        how = "exchanged" if shape.exchanged else "divided"
        raise ConfigError(
            f'model.experts="{how}": {total} experts are too few for {comm.size} ranks; set it to "cut", or '
            f"device.tensor_parallel to {total} or less"
        )
    each, more = divmod(total, comm.size)
    first = comm.rank * each + min(comm.rank, more)
    return first, first + each + (comm.rank < more)


class Stack:
    """Contiguous memory for one linear layer of all experts.

    weights: [E, O, I]; or in 4 bits or float8 after ``pack``, and ``codes`` or ``float8`` until then.
    biases_EO: None without."""

    weights: Tensor | FourBits | EightBits
    codes: StoredCodes | None = None
    float8: StoredFloat8 | None = None

    def __init__(self, linears: Sequence[Linear], device: torch.device, shape: ExpertsShape) -> None:
        like, bias = linears[0].weight, linears[0].bias
        if shape.four_bits:
            self.codes = StoredCodes(len(linears), like.shape[0], like.shape[1], device)
        elif shape.float8:
            self.float8 = StoredFloat8(len(linears), like.shape[0], like.shape[1], device)
        else:
            self.weights = parameter(len(linears), *like.shape, device=device, dtype=like.dtype)
            for linear, weight in zip(linears, self.weights, strict=True):
                linear.weight = weight
        self.biases: Tensor | None = None
        if bias is not None:
            self.biases = parameter(len(linears), *bias.shape, device=device, dtype=like.dtype)
            for linear, bias in zip(linears, self.biases, strict=True):
                linear.bias = bias

    def stored(self, slices: Iterable[WeightSlice], place: int) -> Iterator[WeightSlice]:
        """Yield the slices of what is stored in place of those of weights; biases stay as they are."""
        if self.float8 is not None:
            yield from self.float8.slices(slices, place)
            return
        for one in slices:
            yield from self.codes.slices(one, place) if self.codes is not None and len(one.shape) == 2 else (one,)

    def pack(self) -> None:
        """Bring weights in 4 bits or float8 into the kernel's order; called once, after loading."""
        if self.codes is not None:
            self.weights, self.codes = self.codes.arranged(), None
        if self.float8 is not None:
            self.weights, self.float8 = self.float8.arranged(), None
