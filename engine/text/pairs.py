"""A query and a document as one prompt, which a reranker scores.

Owns: the two ways to join them, by a template or by the tokenizer, and cutting a document that is too long.
Does not know: requests, scores.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from engine.text.chat import ChatTemplate
from engine.types.errors import RequestError
from engine.types.prompt import ChatTurn

QUERY: Final = "query"
DOCUMENT: Final = "document"
ROLES: Final = (QUERY, DOCUMENT)  # exactly a pair's messages; a conversation may have documents among others
Int32 = npt.NDArray[np.int32]


def pair(query: str, document: str) -> tuple[ChatTurn, ...]:
    """Return a query and a document as a prompt."""
    return ChatTurn(QUERY, query), ChatTurn(DOCUMENT, document)


def knows_pairs(template: ChatTemplate | None) -> bool:
    """Return whether a chat template names the roles of a pair."""
    return template is not None and all(
        f"'{role}'" in template.source or f'"{role}"' in template.source for role in ROLES
    )


class Pairs:
    """Encodes pairs.  template: None if the tokenizer joins the two texts."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, turns: Sequence[ChatTurn], truncate_to: int) -> Int32:
        """Return the token ids of a pair.  truncate_to: limit to which the document is cut; 0 for no limit.

        Raises RequestError if the template refuses, or the query alone exceeds the limit."""
        query, document = turns[0].content, turns[-1].content
        ids = self._joined(query, document)
        if not truncate_to or len(ids) <= truncate_to:
            return ids
        encoding = self._encoding(document)
        # At the border of two texts tokens may merge or split, so the first cut may leave a few too many.
        keep = len(encoding.ids) - (len(ids) - truncate_to)
        while keep > 0:
            cut = self._joined(query, document[: encoding.offsets[keep - 1][1]])
            if len(cut) <= truncate_to:
                return cut
            keep -= len(cut) - truncate_to
        raise RequestError(
            f"truncate_prompt_tokens={truncate_to}: the query and the text around it have more tokens; shorten it",
            code="context_length_exceeded",
            param="truncate_prompt_tokens",
        )

    def _joined(self, query: str, document: str) -> Int32:
        if self._template is not None:
            text = self._template.render(pair(query, document))
            return np.array(self._encoding(text).ids, dtype=np.int32)
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([(query, document)])
        except TypeError:
            raise _no_unicode() from None
        return np.array(encoding.ids, dtype=np.int32)

    def _encoding(self, text: str) -> Encoding:
        try:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except TypeError:
            raise _no_unicode() from None
        return encoding


def cut_text(tokenizer: Tokenizer, text: str, truncate_to: int) -> list[int]:
    """Return the token ids of a text with its special tokens, cut at its end to ``truncate_to`` tokens."""
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    encoding.truncate(max(0, truncate_to - tokenizer.num_special_tokens_to_add(False)))
    ids: list[int] = tokenizer.post_process(encoding).ids
    return ids


def _no_unicode() -> RequestError:
    return RequestError("the query or a document is not valid Unicode (lone surrogate)", param="messages")
