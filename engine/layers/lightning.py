"""Lightning attention (Qin et al. 2024) as in MiniMax-01: linear attention, with one decay for all tokens of a head.

Legend: T new tokens of a step · H heads · K size of a key, a query and a value · I values of all heads
        D model dim
Owns: what comes before and after the recurrence, which is Mamba 2's with a step size of 1.
Does not know: the recurrence's form, slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import LightningShape
from engine.layers.comm import Comm
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.mlp import activated, activated_by_rows
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import StatesOfStep
from engine.layers.weights import WeightSlice, joined, parameter, whole


class Lightning(RecurrentPart):
    """Linear attention with decay over activated values, keys and queries, then a norm over all heads, and a gate.

    shape: of this rank's heads.  inner: values, keys, queries, and the gate, in this order."""

    def __init__(
        self, shape: LightningShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.comm = comm
        self.shape = mine = shape.of_rank(comm.size)
        self.inner = ColumnLinear(hidden_size, shape.inner, False, comm, device, dtype)
        self.norm_I = parameter(shape.inner_size, device=device, dtype=torch.float32)
        self.outer = RowLinear(shape.inner_size, hidden_size, False, comm, device, dtype)
        rates = shape.rates[comm.rank * mine.num_heads : (comm.rank + 1) * mine.num_heads]
        self._decay_H = -torch.tensor(rates, dtype=torch.float32, device=device)
        self._nothing_H = torch.zeros_like(self._decay_H)
        self._sizes_1H = torch.zeros((1, mine.num_heads), dtype=dtype, device=device)
        self._activate = activated

    def mix(self, inner_TI: Tensor, states: tuple[Tensor, ...], step: StatesOfStep) -> Tensor:
        """Return the normed and gated result of the recurrence (``RecurrentPart``)."""
        shape, (matrices_SHKK,) = self.shape, states
        vkq_TI, z_TI = inner_TI.split((3 * shape.inner_size, shape.inner_size), -1)
        vkq_TI = self._activate(vkq_TI.float(), "silu").contiguous()
        # The step size of a token is the least one.
        sizes_TH = self._sizes_1H.expand(len(inner_TI), -1)
        nothing_H = self._nothing_H
        o_THK = self.recurrences.ssd(vkq_TI, sizes_TH, self._decay_H, nothing_H, nothing_H, 1.0, matrices_SHKK, step)
        o_TI, several = o_THK.flatten(1), self.comm.size > 1
        if several:  # the norm is over all heads
            o_TI, z_TI = self.comm.all_gather(o_TI), self.comm.all_gather(z_TI.contiguous())
        o_TI = self.recurrences.gate(o_TI, z_TI, self.norm_I, 1, shape.eps, False, "sigmoid")
        return o_TI.tensor_split(self.comm.size, 1)[self.comm.rank] if several else o_TI

    def by_rows(self) -> None:
        """Compute the activation by rows as well (``RowwisePart``)."""
        super().by_rows()
        self._activate = activated_by_rows

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.inner.slices(name)
        yield whole(f"{name}.norm.weight", self.norm_I)
        yield from self.outer.slices(f"{name}.out_proj")
