"""A batch's sampling parameters as tensors, cut into parts that are sampled alike.

Legend: N sampled rows of the batch · n rows of a part · r rows of it with cuts
Owns: which row needs what, the columns that are uploaded.  Does not know: logits, kernels' insides, steps.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels.upload import Upload
from engine.sampling.state import SamplingState
from engine.sampling.triton.adjusted import Adjustment
from engine.sampling.triton.picks import CutRows

_OFF: Final = -1
_NO_IDS: Final = np.empty(0, dtype=np.int64)

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KernelPart:
    """at_n: int64, the part's rows within the batch.  own_n: int64, 0 ... n, their rows once they are adjusted.

    inverse_temperature_n: float32, 0 for greedy rows.  seeds_n: int64.  draws: whether any row is random.
    """

    at_n: Tensor
    own_n: Tensor
    inverse_temperature_n: Tensor
    seeds_n: Tensor
    draws: bool
    adjustment: Adjustment | None
    cut_rows: CutRows | None


class PlannedPart:
    """A part whose parameters are on their way: numbers of uploads, and afterwards their tensors."""

    def __init__(
        self, state: SamplingState, upload: Upload, rows_N: Int64, holding_N: Bools, at: Int64, adjusted: bool
    ) -> None:
        rows_n = rows_N[at]
        self._draws = not state.greedy[rows_n].all()
        self._own = [
            upload.add(at.astype(np.int64)),
            upload.add(np.arange(len(at))),
            upload.add(state.inverse_temperature[rows_n]),
            upload.add(state.seed[rows_n]),
        ]
        self._adjustment = _add_adjustment(state, upload, rows_n, holding_N[at]) if adjusted else None
        self._cuts = _add_cuts(state, upload, rows_n)

    def placed(self, tensors: list[Tensor]) -> KernelPart:
        """The part, from all that was uploaded."""
        at_n, own_n, inverse_n, seeds_n = (tensors[index] for index in self._own)
        adjustment = cut_rows = None
        if self._adjustment is not None:
            adjustment = Adjustment(*(tensors[index] for index in self._adjustment))
        if self._cuts is not None:
            cut_rows = CutRows(*(tensors[index] for index in self._cuts))
        return KernelPart(at_n, own_n, inverse_n, seeds_n, self._draws, adjustment, cut_rows)


def _add_adjustment(state: SamplingState, upload: Upload, rows_n: Int64, holding_n: Bools) -> list[int]:
    """In the order of ``Adjustment``'s fields."""
    penalised_n = state.penalised[rows_n]
    lines_n = np.full(len(rows_n), _OFF, dtype=np.int32)
    lines_n[penalised_n] = state.counts.lines(rows_n[penalised_n])
    biases = [state.bias[row] for row in rows_n.tolist()]
    holds = [state.stop_ids[row] if held else _NO_IDS for row, held in zip(rows_n.tolist(), holding_n, strict=True)]
    return [
        upload.add(lines_n),
        upload.add(state.repetition[rows_n]),
        upload.add(state.presence[rows_n]),
        upload.add(state.frequency[rows_n]),
        upload.add(_starts([ids for ids, _ in biases])),
        upload.add(np.concatenate([ids for ids, _ in biases]).astype(np.int32)),
        upload.add(np.concatenate([values for _, values in biases])),
        upload.add(_starts(holds)),
        upload.add(np.concatenate(holds).astype(np.int32)),
    ]


def _add_cuts(state: SamplingState, upload: Upload, rows_n: Int64) -> list[int] | None:
    """In the order of ``CutRows``' fields; None if no row has cuts."""
    at_r = np.flatnonzero(state.cut[rows_n])
    if not len(at_r):
        return None
    index_n = np.full(len(rows_n), _OFF, dtype=np.int32)
    index_n[at_r] = np.arange(len(at_r))
    rows_r = rows_n[at_r]
    return [
        upload.add(index_n),
        upload.add(at_r.astype(np.int32)),
        upload.add(state.floor[rows_r].view(np.int32)),
        upload.add(state.top_k[rows_r]),
        upload.add(state.top_p[rows_r]),
    ]


def _starts(lists: list[Int64]) -> npt.NDArray[np.int32]:
    starts = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in lists], out=starts[1:])
    return starts
