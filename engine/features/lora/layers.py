"""The products of low-rank adapters (Hu et al. 2021) on top of a linear layer, for all adapters of a step at once.

Legend: T rows of the input · I input features of this rank · O output features of this rank · S slots in use
        P matrices that are merged into the product · R rank of a slot · C = S R
Owns: the stacked matrices and the two products with them.  Does not know: files, which adapter is in a slot.

All slots' A are one matrix, so one product sends all rows through all adapters in use.  A row keeps the numbers of its
own adapter and has zeros for the others, so one product with all slots' B adds the right update to each row.  SGMV
(Chen et al. 2023) and similar methods avoid the superfluous work by special kernels; for few adapters of low rank it is
a small part of the layer's time, and it needs only the matrix products that every device has.  Where this project's
kernels run, each row is multiplied by its own adapter alone (``engine/kernels/adapters.py``).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.packing import PackedWeight


class AdaptedRows:
    """The adapter of each row of a product's input.

    first, end: range of the slots in use.  slots_T is None if no row has an adapter.
    by_kernels: whether kernels read ``slots_T``; without them products read ``reads_TS1``."""

    def __init__(self, *, by_kernels: bool = False) -> None:
        self.by_kernels = by_kernels
        self.first = self.end = 0
        self.slots_T: Tensor | None = None
        self.reads_TS1: Tensor | None = None

    def set(self, slots_T: Tensor, first: int, end: int, dtype: torch.dtype) -> None:
        """Set each row's slot.  slots_T: below 0 for no adapter.  first, end: a range that holds all slots in use."""
        self.first, self.end, self.slots_T = first, end, slots_T
        if self.by_kernels:
            return
        numbers_S = torch.arange(first, end, device=slots_T.device)
        self.reads_TS1 = (slots_T[:, None] == numbers_S).to(dtype)[:, :, None]

    def clear(self) -> None:
        """Set all rows to no adapter."""
        self.slots_T = self.reads_TS1 = None


class AdaptedWeight:
    """A packed weight plus the products of the adapters.

    plain: the weight.
    rows: the adapter of each row, set before the step.
    inputs: input features of this rank.  outputs: output features of this rank, for each merged matrix."""

    def __init__(
        self,
        plain: PackedWeight,
        rows: AdaptedRows,
        inputs: int,
        outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.plain = plain
        self._rows = rows
        self._rank = max_rank
        # On a CPU a slot takes memory only when an adapter is put there.
        self._a_SPRI = torch.zeros(num_slots, len(outputs), max_rank, inputs, device=device, dtype=dtype)
        ends = [sum(outputs[: index + 1]) for index in range(len(outputs))]
        self._places = [slice(end - size, end) for end, size in zip(ends, outputs, strict=True)]
        self._add: Callable[..., Tensor] | None = None
        if not rows.by_kernels:
            self._b_PCO = [torch.zeros(num_slots * max_rank, size, device=device, dtype=dtype) for size in outputs]
            return
        from engine.kernels.adapters import add_adapters, output_tiles  # triton is needed for them

        b_CO = torch.zeros(num_slots * max_rank, sum(outputs), device=device, dtype=dtype)
        self._b_PCO = [b_CO[:, place] for place in self._places]
        b_SRO, tiles = b_CO.view(num_slots, max_rank, -1), output_tiles(list(outputs), device)
        self._add = partial(add_adapters, a_SPRI=self._a_SPRI, b_SRO=b_SRO, tiles=tiles)

    @property
    def nbytes(self) -> int:
        """Memory of the weight and of all slots."""
        return self.plain.nbytes + self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Memory of all slots."""
        return self._a_SPRI.nbytes + sum(b_CO.nbytes for b_CO in self._b_PCO)

    def empty(self, slot: int) -> None:
        """Make a slot add nothing."""
        self._a_SPRI[slot].zero_()
        for b_CO in self._b_PCO:
            b_CO[slot * self._rank : (slot + 1) * self._rank].zero_()

    def put(self, slot: int, matrix: int, a_RI: Tensor, b_RO: Tensor) -> None:
        """Fill an emptied slot for one of the merged matrices.  b_RO is scaled already; R is the adapter's own rank.

        Matrices in page-locked memory are copied without a wait; torch keeps it until an event that follows the copy.
        """
        rank, first = len(a_RI), slot * self._rank
        self._a_SPRI[slot, matrix, :rank].copy_(a_RI, non_blocking=True)
        self._b_PCO[matrix][first : first + rank].copy_(b_RO, non_blocking=True)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return the product with the adapters' updates (``PackedWeight``)."""
        y_TO = self.plain(x_TI, bias_O)
        rows = self._rows
        if rows.slots_T is None:
            return y_TO
        if self._add is not None:
            return self._add(y_TO, x_TI, rows.slots_T)
        assert rows.reads_TS1 is not None
        a_SPRI = self._a_SPRI[rows.first : rows.end]
        num_slots, num_matrices, rank, inputs = a_SPRI.shape
        h_TSPR = F.linear(x_TI, a_SPRI.view(-1, inputs)).view(-1, num_slots, num_matrices, rank)
        # The masked product also makes the numbers of each matrix contiguous.
        h_PTSR = h_TSPR.new_empty(num_matrices, len(h_TSPR), num_slots, rank)
        torch.mul(h_TSPR.permute(2, 0, 1, 3), rows.reads_TS1, out=h_PTSR)
        h_PTC = h_PTSR.view(num_matrices, -1, num_slots * rank)
        first, end = rows.first * rank, rows.end * rank
        if num_matrices == 1:
            return y_TO.addmm_(h_PTC[0], self._b_PCO[0][first:end])
        for h_TC, place, b_CO in zip(h_PTC.unbind(), self._places, self._b_PCO, strict=True):
            y_TO[:, place].addmm_(h_TC, b_CO[first:end])
        return y_TO
