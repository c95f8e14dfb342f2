"""Counts of the tokens that each row's sequence has, and the penalties computed from them.

Legend: p rows of a part that have a penalty · V vocabulary
Owns: the counts, on the device.  Does not know: the other sampling parameters, batches.

Memory: one integer per vocabulary entry for each row that has a penalty at the same time (152 k entries: 0.6 MB,
half of that when max_len is below 16,384), allocated when the first such sequence is admitted and reused afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.upload import upload

if TYPE_CHECKING:
    from engine.sampling.state import Newcomer

# The penalties in the order of their columns, with the value that means none.  Each is ``{name}_penalty`` of
# SamplingParams; ``Penalties.apply`` and ``engine/sampling/triton/adjusted.py`` compute them.
NO_PENALTIES: Final = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}

_FIRST_CAPACITY: Final = 4
# An entry is 2 * (times in the output) + (1 if in the prompt).
_IN_PROMPT: Final = 1
_IN_OUTPUT: Final = 2


class TokenCounts:
    """Counts of the rows that need them.  A row's counts are a line of one device tensor."""

    def __init__(self, max_rows: int, vocab_size: int, max_len: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._dtype = torch.int16 if _IN_OUTPUT * max_len + _IN_PROMPT <= torch.iinfo(torch.int16).max else torch.int32
        self._counts_CV = torch.zeros((0, vocab_size), dtype=self._dtype, device=device)
        self._line_of_row: dict[int, int] = {}
        self._free_lines: list[int] = []

    def hold(self, newcomers: "Sequence[Newcomer]") -> None:
        """Count these rows' tokens from now on, starting with those known already: one packed copy."""
        lines, prompts, outputs = [], [], []
        for one in newcomers:
            if not self._free_lines:
                self._grow()
            line = self._line_of_row[one.row] = self._free_lines.pop()
            lines.append(line)
            at = one.token_ids + np.int64(line * self._vocab_size)
            prompts.append(at[: one.num_prompt_tokens])
            outputs.append(at[one.num_prompt_tokens :])
        columns = (np.array(lines, dtype=np.int64), np.concatenate(prompts), np.concatenate(outputs))
        line_n, prompt_at, output_at = upload(columns, self._device)
        self._counts_CV.index_fill_(0, line_n, 0)
        counts = self._counts_CV.view(-1)
        counts.index_fill_(0, prompt_at, _IN_PROMPT)
        counts.index_add_(0, output_at, counts.new_full((1,), _IN_OUTPUT).expand(len(output_at)))

    def release(self, row: int) -> None:
        """Free the row's line."""
        line = self._line_of_row.pop(row, None)
        if line is not None:
            self._free_lines.append(line)

    def lines(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the line of every row; all of them must be held."""
        return np.array([self._line_of_row[row] for row in rows.tolist()], dtype=np.int64)

    def reserve(self) -> int:
        """Allocate the lines of all rows now, so that the table keeps its address, plus a spare line; return the
        number of the spare line."""
        while self._counts_CV.shape[0] < self._max_rows:
            self._grow()
        if self._counts_CV.shape[0] == self._max_rows:
            self._counts_CV = torch.cat((self._counts_CV, self._counts_CV.new_zeros((1, self._vocab_size))))
        return self._max_rows

    @property
    def table_CV(self) -> Tensor:
        """All lines; growing replaces the tensor."""
        return self._counts_CV

    def read(self, lines_p: Tensor) -> Tensor:
        """Return a copy of some lines, counts_pV."""
        return self._counts_CV.index_select(0, lines_p)

    def add(self, lines_p: Tensor, token_ids_p: Tensor) -> None:
        """Count one output token per line; -1 counts nothing."""
        at_p = lines_p * self._vocab_size + token_ids_p.clamp(min=0)
        self._counts_CV.view(-1).index_add_(0, at_p, ((token_ids_p >= 0) * _IN_OUTPUT).to(self._dtype))

    def _grow(self) -> None:
        held = self._counts_CV.shape[0]
        capacity = min(max(_FIRST_CAPACITY, 2 * held), self._max_rows)
        assert capacity > held, f"{held} lines are held, max_rows is {self._max_rows}"
        more = torch.zeros((capacity - held, self._vocab_size), dtype=self._dtype, device=self._device)
        self._counts_CV = torch.cat((self._counts_CV, more))
        self._free_lines.extend(range(held, capacity))


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of some rows of a part.

    at_p: int64, indices into the part's rows.  lines_p: int64, their lines of counts.
    columns: name -> float32 [p, 1]; a penalty that no row has is missing."""

    at_p: Tensor
    lines_p: Tensor
    columns: Mapping[str, Tensor]

    def apply(self, logits_nV: Tensor, counts: TokenCounts) -> None:
        """Change the rows' float32 logits in place.

        Repetition (Keskar et al. 2019, section 4.1, with the sign rule of transformers): for a token of prompt or
        output, a positive logit is divided and a negative one multiplied.  Then frequency and presence (OpenAI API
        reference): minus frequency for every time a token is in the output, minus presence if it is there at all.
        """
        logits_pV = logits_nV.index_select(0, self.at_p)
        counts_pV = counts.read(self.lines_p)
        if (repetition_p1 := self.columns.get("repetition")) is not None:
            scaled_pV = torch.where(logits_pV > 0, logits_pV / repetition_p1, logits_pV * repetition_p1)
            logits_pV = torch.where(counts_pV > 0, scaled_pV, logits_pV)
        times_pV = counts_pV >> 1
        if (frequency_p1 := self.columns.get("frequency")) is not None:
            logits_pV -= frequency_p1 * times_pV
        if (presence_p1 := self.columns.get("presence")) is not None:
            logits_pV -= presence_p1 * (times_pV > 0)
        logits_nV.index_copy_(0, self.at_p, logits_pV)


def by_name(penalties_pP: Tensor) -> dict[str, Tensor]:
    """Return the columns of all penalties, as in ``Penalties``."""
    return dict(zip(NO_PENALTIES, penalties_pP.split(1, dim=1), strict=True))
