"""Positions with three axes: frame, line and column, in a prompt with pictures (Wang et al. 2024, M-RoPE).

Legend: P tokens of a prompt
Owns: the numbers of each token.  Does not know: torch, rotation.

A text's token has one number on all axes.  A picture's tokens have the number of the token after the text before it,
plus their frame, line and column; the text goes on after the largest of the lines and columns.  Frames of a film have
an interval between them, or texts.  The tokens behind the prompt go on after its largest number, so they have their
place in the row plus a number that is the same for all of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.features.images.messages import RowPicture
from engine.text.pictures import runs_of

Int64 = npt.NDArray[np.int64]


class RowPositions:
    """The positions of one row.  pictures: of its prompt, in their order."""

    def __init__(self, num_prompt_tokens: int, pictures: Sequence[RowPicture]) -> None:
        self._of_prompt_3P = np.empty((3, num_prompt_tokens), dtype=np.int64)
        at = number = 0
        for one in pictures:
            runs = runs_of(one.places_n)
            for first, end in runs:
                grid = (one.grid[0] // len(runs), *one.grid[1:])
                assert end - first == np.prod(grid), f"{end - first} places in a row, for a grid of {grid}"
                self._of_prompt_3P[:, at:first] = np.arange(first - at) + number
                number += first - at
                cells = np.indices(grid).reshape(3, -1)
                cells[0] = (cells[0].astype(np.float32) * np.float32(one.interval)).astype(np.int64)
                self._of_prompt_3P[:, first:end] = cells + number
                at, number = end, number + max(one.grid[1:])
        self._of_prompt_3P[:, at:] = np.arange(num_prompt_tokens - at) + number
        self.shift = int(self._of_prompt_3P.max()) + 1 - num_prompt_tokens

    def positions(self, start: int, length: int) -> Int64:
        """Return the positions of tokens from ``start`` on, [3, length]."""
        known = self._of_prompt_3P[:, start : start + length]
        found = np.empty((3, length), dtype=np.int64)  # in rows, which an upload needs
        found[:, : known.shape[1]] = known
        found[:, known.shape[1] :] = np.arange(start + known.shape[1], start + length) + self.shift
        return found
