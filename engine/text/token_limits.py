"""Limits on an output's tokens whatever its text: a list of allowed tokens, and words that must not be spelt.

Owns: a mask of allowed tokens, and the progress of the output within each word.  Does not know: text, rows, devices.
It is a matcher like that of a grammar, around one or alone, so every way of sampling obeys it.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.text.grammar import GrammarFailure, Mask, Matcher
from engine.types.params import SamplingParams

_WORD_BITS = 32


class TokenLimits:
    """The limits of one output.  inner: the matcher of its grammar, if it has one."""

    def __init__(self, params: SamplingParams, num_words: int, inner: Matcher | None = None) -> None:
        """Build the masks.  num_words: int32 words of a mask."""
        self._inner = inner
        self._allowed = mask_of(params.allowed_token_ids, num_words) if params.allowed_token_ids else None
        # A tokenizer may have more tokens than the model; a word with one of those is never produced.
        self._banned = [ids for ids in params.bad_token_ids if ids and max(ids) < num_words * _WORD_BITS]
        # Enough of the output to decide whether the next token would complete a word.
        self._last: deque[int] = deque(maxlen=max(map(len, self._banned), default=1))

    def consume(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.consume(token_id)
        self._last.append(token_id)

    def fill(self, mask: Mask) -> None:
        if self._inner is not None:
            self._inner.fill(mask)
        else:
            mask.fill(-1)
        if self._allowed is not None:
            mask &= self._allowed
        last = tuple(self._last)
        for *before, token_id in self._banned:
            if tuple(before) == last[len(last) - len(before) :]:
                mask[token_id // _WORD_BITS] &= ~np.left_shift(np.int32(1), np.int32(token_id % _WORD_BITS))
        if not mask.any():
            raise GrammarFailure("allowed_token_ids and bad_words leave no token")


def mask_of(token_ids: Sequence[int], num_words: int) -> Mask:
    """Return the mask that allows these tokens alone."""
    bits = np.zeros(num_words * _WORD_BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
