"""Log probabilities with their tokens as text, as clients see them.

Owns: those of a prompt, while its parts arrive.  Does not know: requests, how they are computed.
"""

import numpy as np
import numpy.typing as npt

from engine.text.codec import TextCodec
from engine.types.logprobs import Logprobs, PromptLogprobs, TokenLogprobs


class PromptLogprobTexts:
    """The log probabilities of a prompt's tokens.  The first token has none."""

    def __init__(self, codec: TextCodec, token_ids: npt.NDArray[np.int32]) -> None:
        self._codec = codec
        self._token_ids: list[int] = token_ids.tolist()
        self._logprobs: list[Logprobs | None] = [None] * len(token_ids)

    def take(self, part: PromptLogprobs) -> None:
        """Keep a part.  After a retraction a step computes it again, with the same numbers."""
        self._logprobs[part.first : part.first + len(part.entries)] = part.entries

    def entries(self) -> tuple[TokenLogprobs, ...]:
        """Return the entries of all tokens."""
        return tuple(
            TokenLogprobs(sampled=self._codec.token_text(token_id, 0.0), top=())
            if logprobs is None
            else logprob_texts(self._codec, token_id, logprobs)
            for token_id, logprobs in zip(self._token_ids, self._logprobs, strict=True)
        )


def logprob_texts(codec: TextCodec, token_id: int, logprobs: Logprobs) -> TokenLogprobs:
    """Return the log probability of a sampled or given token, and those of the likeliest tokens at its place."""
    if not logprobs.top_ids:
        return TokenLogprobs(sampled=codec.token_text(token_id, logprobs.logprob), top=())
    ids = np.frombuffer(logprobs.top_ids, dtype=np.int32).tolist()
    values = np.frombuffer(logprobs.top_logprobs, dtype=np.float32).tolist()
    return TokenLogprobs(
        sampled=codec.token_text(token_id, logprobs.logprob),
        top=tuple(codec.token_text(*pair) for pair in zip(ids, values, strict=True)),
    )
