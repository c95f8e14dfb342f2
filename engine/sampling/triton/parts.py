"""A batch's sampling parameters as tensors, split into parts that are sampled alike.

Legend: N sampled rows of the batch · n rows of a part · r rows of it with cuts
Owns: the needs of each row, the columns that are uploaded.  Does not know: logits, kernels, steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.draw import BLOCK
from engine.sampling.state import SamplingState
from engine.sampling.triton.adjusted import Adjustment
from engine.sampling.triton.picks import CutRows
from engine.sampling.triton.scores import has_far_cut

_OFF: Final = -1
_NO_IDS: Final = np.empty(0, dtype=np.int64)

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Arrays = list[npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class KernelPart:
    """A part on the device.

    at_n: int64, its rows of the batch.  own_n: int64, 0 ... n - 1, its rows of the adjusted logits.
    inverse_temperature_n: float32, 0 for greedy rows.  seeds_n: int64.  draws: whether any row is random.
    far_cuts: whether any row has a far cut (``scores.py``).
    """

    at_n: Tensor
    own_n: Tensor
    inverse_temperature_n: Tensor
    seeds_n: Tensor
    draws: bool
    far_cuts: bool
    adjustment: Adjustment | None
    cut_rows: CutRows | None


@dataclass(frozen=True, slots=True)
class HostPart:
    """A part before its upload.  columns, adjustment, cuts: arrays in the order of ``KernelPart``'s first four fields,
    of ``Adjustment`` and of ``CutRows``; empty if the part has none."""

    columns: Arrays
    draws: bool
    far_cuts: bool
    adjustment: Arrays
    cuts: Arrays


def plan_part(state: SamplingState, rows_N: Int64, holding_N: Bools, at: Int64, adjusted: bool) -> HostPart:
    """Return the part of the batch's rows ``at``, on the host.  holding_N: as in ``build_batch``."""
    rows_n, num_blocks = rows_N[at], -(-state.vocab_size // BLOCK)
    return HostPart(
        columns=[at, np.arange(len(at)), state.inverse_temperature[rows_n], state.seed[rows_n]],
        draws=not state.greedy[rows_n].all(),
        # The rule of the kernels, with arrays.
        far_cuts=bool(has_far_cut.fn(state.top_k[rows_n], state.top_p[rows_n], num_blocks).any()),
        adjustment=_adjustment(state, rows_n, holding_N[at]) if adjusted else [],
        cuts=_cuts(state, rows_n),
    )


def place(parts: Sequence[HostPart], device: torch.device) -> tuple[KernelPart, ...]:
    """Return the parts on the device, uploaded in one copy."""
    arrays = [array for part in parts for array in (*part.columns, *part.adjustment, *part.cuts)]
    tensors = iter(upload(arrays, device))
    placed = []
    for part in parts:
        at_n, own_n, inverse_n, seeds_n = islice(tensors, len(part.columns))
        adjustment = Adjustment(*islice(tensors, len(part.adjustment))) if part.adjustment else None
        cut_rows = CutRows(*islice(tensors, len(part.cuts))) if part.cuts else None
        placed.append(KernelPart(at_n, own_n, inverse_n, seeds_n, part.draws, part.far_cuts, adjustment, cut_rows))
    return tuple(placed)


def _adjustment(state: SamplingState, rows_n: Int64, holding_n: Bools) -> Arrays:
    penalised_n = state.penalised[rows_n]
    lines_n = np.full(len(rows_n), _OFF, dtype=np.int32)
    lines_n[penalised_n] = state.counts.lines(rows_n[penalised_n])
    biases = [state.bias[row] for row in rows_n.tolist()]
    holds = [state.stop_ids[row] if held else _NO_IDS for row, held in zip(rows_n.tolist(), holding_n, strict=True)]
    return [
        lines_n,
        state.penalties[rows_n].ravel(),
        _starts([ids for ids, _ in biases]),
        np.concatenate([ids for ids, _ in biases]).astype(np.int32),
        np.concatenate([values for _, values in biases]),
        _starts(holds),
        np.concatenate(holds).astype(np.int32),
    ]


def _cuts(state: SamplingState, rows_n: Int64) -> Arrays:
    at_r = np.flatnonzero(state.cut[rows_n])
    if not len(at_r):
        return []
    index_n = np.full(len(rows_n), _OFF, dtype=np.int32)
    index_n[at_r] = np.arange(len(at_r))
    rows_r = rows_n[at_r]
    floor_r = state.floor[rows_r].view(np.int32)
    return [index_n, at_r.astype(np.int32), floor_r, state.top_k[rows_r], state.top_p[rows_r]]


def _starts(lists: list[Int64]) -> npt.NDArray[np.int32]:
    starts = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in lists], out=starts[1:])
    return starts
