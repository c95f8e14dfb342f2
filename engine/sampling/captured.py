"""Sampling of fixed batches: the parameters of up to M rows, in tensors at fixed addresses.

Captured steps sample with these.  Whatever rows a batch has, the same operations run on the same memory; only the
variant depends on the rows' parameters, so that a greedy batch does not pay for cuts.

Legend: M most rows of a batch · B rows of a batch, padding included · N rows of a batch, without · V vocabulary
Owns: the columns, which variant a batch needs, sampling by columns.  Does not know: graphs, steps, copies.
``sampler.py`` defines a row's token; this module picks the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.cuts import Cuts, TopK, lowest_kept
from engine.sampling.draw import draw, padded_scores, stream_starts, uniforms, weights
from engine.sampling.penalties import NO_PENALTIES, Penalties, by_name
from engine.sampling.state import NO_LOGPROBS, SamplingState

if TYPE_CHECKING:
    from engine.sampling.triton.parts import KernelPart
    from engine.sampling.triton.sampler import KernelSampler

NO_ROW: Final = -1  # padding
_OFF: Final = -1

C = TypeVar("C", Tensor, npt.NDArray[Any])
Int64 = npt.NDArray[np.int64]


class SamplingVariant(StrEnum):
    """A way to sample a batch.  logits: not here; the step returns logits, and the ``Sampler`` picks from them."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    CUT = "cut"
    FULL = "full"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[C]):
    """Sampling parameters with one entry per row of a batch; in memory they follow each other in this order.

    rows: int64, number of the row in the engine, NO_ROW for padding.
    seed to top_k: as in SamplingState; ``penalties`` has several numbers for each row.
    cut: int32, the row's index in its group (``CapturedSampler.group``) if it has cuts, else -1.
    line: int32, the row's line of token counts, -1 without penalties.
    """

    rows: C
    seed: C
    top_p: C
    inverse_temperature: C
    penalties: C
    floor: C
    top_k: C
    cut: C
    line: C


_OF_STATE: Final = ("seed", "top_p", "inverse_temperature", "penalties", "floor", "top_k")
_DTYPES: Final = (*["int64"] * 2, "float64", *["float32"] * 3, *["int32"] * 3)
_WIDTHS: Final = (*[1] * 4, len(NO_PENALTIES), *[1] * 4)  # numbers of one row in each column


def columns_bytes(max_rows: int) -> int:
    """Return the memory of columns of so many rows."""
    return max_rows * sum(np.dtype(dtype).itemsize * width for dtype, width in zip(_DTYPES, _WIDTHS, strict=True))


def tensor_columns(packed: Tensor, max_rows: int) -> SamplingColumns[Tensor]:
    """Return columns in a uint8 tensor."""
    return _columns(lambda part, dtype: part.view(getattr(torch, dtype)), packed, max_rows)


def array_columns(packed: npt.NDArray[np.uint8], max_rows: int) -> SamplingColumns[npt.NDArray[Any]]:
    """Return columns in a uint8 array."""
    return _columns(lambda part, dtype: part.view(dtype), packed, max_rows)


def _columns(view: Callable[[C, str], C], packed: C, max_rows: int) -> SamplingColumns[C]:
    start, made = 0, []
    for dtype, width in zip(_DTYPES, _WIDTHS, strict=True):
        end = start + max_rows * width * np.dtype(dtype).itemsize
        column = view(packed[start:end], dtype)
        made.append(column if width == 1 else column.reshape(max_rows, width))
        start = end
    return SamplingColumns(*made)


class CapturedSampler:
    """Samples batches of one rank's rows by columns; built once, for batches of up to ``max_rows``."""

    def __init__(self, state: SamplingState, kernels: "KernelSampler | None", columns: SamplingColumns[Tensor]) -> None:
        """Take memory for batches of as many rows as ``columns`` has, which are on the device of ``state``."""
        self._state = state
        self._kernels = kernels
        self._columns = columns
        self.max_rows = len(columns.rows)
        # Rows with cuts or penalties take memory per vocabulary entry, so kernels work on groups of them.
        self.group = self.max_rows
        if kernels is not None:
            from engine.sampling.triton.sampler import rows_at_once  # triton is needed for it

            self.group = min(self.group, rows_at_once(state.vocab_size))
        # Captured kernels keep the address of the counts, so the lines of all rows are allocated now, plus a spare one.
        self._spare_line = state.counts.reserve()
        device = state.device
        self._places_M = torch.arange(self.max_rows, device=device)
        self._places32_M = self._places_M.to(torch.int32)
        self._starts_M1 = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=device)
        self._no_ids = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_bias = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def version(self) -> int:
        """Version of the rows' parameters, which changes with any row."""
        return self._state.version

    @property
    def static(self) -> tuple[Tensor, ...]:
        """Tensors that captured sampling reads and writes, besides the columns and its arguments."""
        mine = (self._places_M, self._places32_M, self._starts_M1, self._no_ids, self._no_bias)
        return (*mine, self._state.counts.table_CV)

    def variant_of(self, rows_N: Int64, positions_N: Int64) -> SamplingVariant:
        """Return the cheapest variant that serves these rows.  positions_N: of the tokens that will be sampled."""
        state = self._state
        if (
            state.biased[rows_N].any()
            or state.processed[rows_N].any()
            or (state.logprobs[rows_N] != NO_LOGPROBS).any()
            or (positions_N < state.stop_from[rows_N]).any()
        ):
            return SamplingVariant.LOGITS
        if state.penalised[rows_N].any():
            return SamplingVariant.FULL
        if state.cut[rows_N].any():
            return SamplingVariant.CUT
        return SamplingVariant.GREEDY if state.greedy[rows_N].all() else SamplingVariant.TEMPERATURE

    def fill(self, columns: SamplingColumns[npt.NDArray[Any]], rows_N: Int64) -> None:
        """Write the columns of a batch of these rows; the remaining entries are padding, which is greedy."""
        state, num = self._state, len(rows_N)
        for field in fields(columns):
            getattr(columns, field.name)[num:] = _PADDING.get(field.name, 0)
        columns.rows[:num] = rows_N
        for name in _OF_STATE:
            getattr(columns, name)[:num] = getattr(state, name)[rows_N]
        columns.cut[:num] = np.where(state.cut[rows_N], np.arange(num) % self.group, _OFF)
        columns.line[:num] = _OFF
        penalised_N = state.penalised[rows_N]
        if penalised_N.any():
            columns.line[:num][penalised_N] = state.counts.lines(rows_N[penalised_N])

    def pick(self, variant: SamplingVariant, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        """Return token_ids_B, int64, by the first B columns; -1 if a row's logits have no finite maximum.

        positions_B: int64, of the sampled tokens.  Nothing here waits for the device or depends on values.
        """
        size = len(logits_BV)
        if self._kernels is not None:
            parts = self._kernel_parts(variant, size)
            token_ids_B = self._kernels.pick(
                parts, logits_BV, None if variant is SamplingVariant.GREEDY else positions_B
            )
        else:
            token_ids_B = self._pick_by_torch(variant, logits_BV, positions_B)
        if variant is SamplingVariant.FULL:
            self._state.counts.add(self._lines(size), token_ids_B)
        return token_ids_B

    def _lines(self, size: int) -> Tensor:
        """Return the lines to count in; rows without penalties count in the spare line, which is never read."""
        line_B = self._columns.line[:size].to(torch.int64)
        return torch.where(line_B < 0, self._spare_line, line_B)

    def _kernel_parts(self, variant: SamplingVariant, size: int) -> "tuple[KernelPart, ...]":
        # Triton is needed from here on.
        from engine.sampling.triton.adjusted import Adjustment
        from engine.sampling.triton.parts import KernelPart
        from engine.sampling.triton.picks import CutRows

        parts = []
        cuts = variant in (SamplingVariant.CUT, SamplingVariant.FULL)
        group = self.group if cuts else size  # rows with cuts or penalties take memory per vocabulary entry
        for first in range(0, size, group):
            here = slice(first, min(first + group, size))
            num = here.stop - first
            of = SamplingColumns(*(getattr(self._columns, field.name)[here] for field in fields(self._columns)))
            adjustment = cut_rows = None
            if variant is SamplingVariant.FULL:
                starts = self._starts_M1[: num + 1]
                adjustment = Adjustment(
                    of.line, of.penalties, starts, self._no_ids, self._no_bias, starts, self._no_ids
                )
            if cuts:
                floor = of.floor.view(torch.int32)
                cut_rows = CutRows(of.cut, self._places32_M[:num], floor, of.top_k, of.top_p)
            draws = variant is not SamplingVariant.GREEDY
            at, own = self._places_M[here], self._places_M[:num]
            parts.append(KernelPart(at, own, of.inverse_temperature, of.seed, draws, cuts, adjustment, cut_rows))
        return tuple(parts)

    def _pick_by_torch(self, variant: SamplingVariant, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        size, columns = len(logits_BV), self._columns
        finite_B = logits_BV.amax(dim=-1).isfinite()
        if variant is SamplingVariant.FULL:
            logits_BV = logits_BV.to(torch.float32, copy=True)
            Penalties(
                at_p=self._places_M[:size],
                lines_p=self._lines(size),
                columns=by_name(columns.penalties[:size]),
            ).apply(logits_BV, self._state.counts)
        top_B, token_ids_B = logits_BV.max(dim=-1)
        if variant is not SamplingVariant.GREEDY:
            inverse_B = columns.inverse_temperature[:size]
            scores_BW = padded_scores(logits_BV, top_B, inverse_B)
            weights_BW = weights(scores_BW)
            if variant in (SamplingVariant.CUT, SamplingVariant.FULL):
                weights_BW.masked_fill_(scores_BW < lowest_kept(scores_BW, weights_BW, self._cuts(size)), 0.0)
            numbers_B = uniforms(stream_starts(columns.seed[:size]), positions_B)
            token_ids_B = torch.where(inverse_B > 0, draw(weights_BW, numbers_B), token_ids_B)
        return torch.where(finite_B & top_B.isfinite(), token_ids_B, -1)

    def _cuts(self, size: int) -> Cuts:
        """Return cuts for every row; most of them cut nothing."""
        columns, vocab_size = self._columns, self._state.vocab_size
        top_k_B1 = columns.top_k[:size, None].to(torch.int64)
        return Cuts(
            floor_n1=-columns.floor[:size, None],
            top_k=TopK(
                at_r=self._places_M[:size],
                last_r1=torch.where(top_k_B1 > 0, top_k_B1, vocab_size) - 1,
                width=vocab_size,
                top_p_r1=columns.top_p[:size, None],
            ),
            top_p=None,
        )


# Content of a column for padding; 0 in the columns that are not listed.
_PADDING: Final[dict[str, Any]] = {
    "rows": NO_ROW,
    "top_p": 1.0,
    "penalties": tuple(NO_PENALTIES.values()),
    "floor": np.inf,
    "cut": _OFF,
    "line": _OFF,
}
