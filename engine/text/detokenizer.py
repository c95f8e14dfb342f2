"""Token ids to text, a few at a time: what may be shown now, never half a character.

Owns: the bytes of a character that is not complete yet.  Does not know: stop strings, requests.

Measured on one core: 0.5 us a token when pushed one by one, 0.04 us in large groups.
"""

import codecs
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.text.vocabulary import Vocabulary

_LONGEST_CHARACTER_BYTES = 4

TokenIds = Sequence[int] | npt.NDArray[np.int32]


class Detokenizer:
    """One sequence's text.  The pushed texts joined are the text of all tokens after the prompt's.

    Bytes that are not UTF-8 come out as U+FFFD, one per maximal invalid part (Unicode 15, section 3.9).
    """

    __slots__ = ("_leading_spaces", "_pending", "_pieces", "_prompt_only")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, prompt_ids: TokenIds = ()) -> None:
        """prompt_ids: what came before.  It decides whether a leading space belongs to the text, and may end within
        a character that the first tokens complete."""
        self._pieces = vocabulary.visible_pieces if skip_special_tokens else vocabulary.all_pieces
        before = self._last_bytes(prompt_ids)
        self._leading_spaces = 0 if before else vocabulary.leading_spaces
        self._pending = before[codecs.utf_8_decode(before, "replace", False)[1] :]
        self._prompt_only = True  # nothing but the prompt is pending

    def push(self, token_ids: TokenIds) -> str:
        """The text that these tokens complete."""
        pieces = self._pieces
        data = b"".join([pieces[token_id] for token_id in token_ids if 0 <= token_id < len(pieces)])
        if not data:
            return ""
        self._prompt_only = False
        if self._leading_spaces:
            data = self._without_leading_spaces(data, token_ids)
        if self._pending:
            data = self._pending + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return text

    def finish(self) -> str:
        """The text that is left: U+FFFD for a character that will never be complete."""
        pending, self._pending = self._pending, b""
        return "" if self._prompt_only else codecs.utf_8_decode(pending, "replace", True)[0]

    def _last_bytes(self, token_ids: TokenIds) -> bytes:
        """The end of a text: enough to hold any incomplete character; empty only if all of the text is."""
        data = b""
        for token_id in reversed(token_ids):
            if 0 <= token_id < len(self._pieces):
                data = self._pieces[token_id] + data
            if len(data) >= _LONGEST_CHARACTER_BYTES:
                break
        return data[-_LONGEST_CHARACTER_BYTES:]

    def _without_leading_spaces(self, data: bytes, token_ids: TokenIds) -> bytes:
        """The data without the spaces that the tokenizer puts in front of the first word, in the first piece alone."""
        in_range = (token_id for token_id in token_ids if 0 <= token_id < len(self._pieces))
        first = next(piece for token_id in in_range if (piece := self._pieces[token_id]))
        num_spaces = min(self._leading_spaces, len(first) - len(first.lstrip(b" ")))
        self._leading_spaces = 0
        return data[num_spaces:]
