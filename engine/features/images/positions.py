"""Positions with three axes: frame, line and column, in a prompt with pictures (Wang et al. 2024, M-RoPE).

Legend: P tokens of a prompt
Owns: the numbers of each token.  Does not know: torch, rotation.

A text's token has one number on all axes.  A picture's tokens have the number of the token after the text before it,
plus their frame, line and column; the text goes on after the largest of them.  So a row's later tokens have their
place in the row plus a number that is the same for all of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.features.images.messages import RowPicture

Int64 = npt.NDArray[np.int64]


class RowPositions:
    """The positions of one row.  pictures: of its prompt, in their order."""

    def __init__(self, num_tokens: int, pictures: Sequence[RowPicture]) -> None:
        self._of_prompt_3P = np.empty((3, num_tokens), dtype=np.int64)
        at = number = 0
        for one in pictures:
            places = one.places_n
            first, end = int(places[0]), int(places[-1]) + 1
            assert end - first == len(places), "a picture with lines and columns has its places in a row"
            self._of_prompt_3P[:, at:first] = np.arange(first - at) + number
            number += first - at
            self._of_prompt_3P[:, first:end] = np.indices(one.grid).reshape(3, -1) + number
            at, number = end, number + max(one.grid)
        self._of_prompt_3P[:, at:] = np.arange(num_tokens - at) + number
        self.shift = number - at

    def positions(self, start: int, length: int) -> Int64:
        """Return the positions of tokens from ``start`` on, [3, length]."""
        known = self._of_prompt_3P[:, start : start + length]
        later = np.arange(start + known.shape[1], start + length) + self.shift
        return np.concatenate((known, np.broadcast_to(later, (3, len(later)))), axis=1)
