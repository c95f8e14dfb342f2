"""Logits processors of plugins: the rows that use them, and the copies of logits that they may change.

Legend: N sampled rows of the step · n rows of one processor · V vocabulary · R rows · M most tokens of a row
Owns: the processors of each row's request.  Does not know: what a processor does, how a token is picked.
Steps with such rows sample outside of captured graphs; the forward pass is still replayed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.state import Newcomer
from engine.text.processors import LogitsRows, Processors

log = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _ProcessedRow:
    """A row with processors.  params: by the processor's name."""

    params: dict[str, msgspec.Struct]
    num_prompt: int


class Processing:
    """The processors of the rows of one rank.  tokens_RM: the rows' tokens on the device, which steps write."""

    def __init__(self, processors: Processors, tokens_RM: Tensor) -> None:
        self._processors = processors
        self._tokens_RM = tokens_RM
        self._rows: dict[int, _ProcessedRow] = {}

    def admit(self, newcomers: Sequence[Newcomer]) -> None:
        """Assign rows to sequences; nothing of the rows' former sequences remains."""
        for one in newcomers:
            self._rows.pop(one.row, None)
            if one.params.logits_processors:
                params = self._processors.read(one.params.logits_processors)
                self._rows[one.row] = _ProcessedRow(params, one.num_prompt_tokens)

    def apply(self, logits_NV: Tensor, rows_N: Int64, positions_N: Int64) -> Tensor:
        """Return the logits to pick from: the logits themselves if no row has processors, else a float32 copy.

        positions_N: number of tokens before the picked one."""
        named = [(index, self._rows[row]) for index, row in enumerate(rows_N.tolist()) if row in self._rows]
        if not named:
            return logits_NV
        logits_NV = logits_NV.to(torch.float32, copy=True)
        for name in self._processors.by_name:
            if mine := [(index, row) for index, row in named if name in row.params]:
                self._process(name, mine, logits_NV, rows_N, positions_N)
        return logits_NV

    def _process(
        self, name: str, mine: list[tuple[int, _ProcessedRow]], logits_NV: Tensor, rows_N: Int64, positions_N: Int64
    ) -> None:
        at = np.array([index for index, _ in mine], dtype=np.int64)
        lengths = positions_N[at]
        num_prompt = np.array([row.num_prompt for _, row in mine], dtype=np.int64)
        at_n, rows_n, lengths_n, num_prompt_n = upload((at, rows_N[at], lengths, num_prompt), logits_NV.device)
        logits_nV = logits_NV.index_select(0, at_n)
        rows = LogitsRows(
            params=tuple(row.params[name] for _, row in mine),
            token_ids_nL=self._tokens_RM[:, : int(lengths.max())].index_select(0, rows_n),
            lengths_n=lengths_n,
            num_prompt_n=num_prompt_n,
            host_lengths_n=lengths,
            upload=lambda values: upload((values,), logits_NV.device)[0],
        )
        try:
            processed_nV = self._processors.by_name[name].process(logits_nV.clone(), rows)
            seen, expected = _kind(processed_nV), _kind(logits_nV)
            if seen != expected:
                raise TypeError(f"it returned {seen}, not {expected}")
        except torch.OutOfMemoryError:
            raise  # the step is retried in parts
        except Exception:
            log.exception("plugin logits_processor.%s failed; the requests that use it end", name)
            processed_nV = torch.full_like(logits_nV, torch.nan)  # a row without a finite maximum fails
        logits_NV.index_copy_(0, at_n, processed_nV)


def _kind(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:100]
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
