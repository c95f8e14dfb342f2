"""A prompt's log probabilities as its parts come in.

Owns: which token has which.  Does not know: text, why a part may come twice.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engine.messages import Logprobs, PromptLogprobs


class PromptColumns:
    """token_ids: int32[n], the prompt.  Iterating gives (token id, log probabilities); the first token has none."""

    def __init__(self, token_ids: npt.NDArray[np.int32]) -> None:
        self._token_ids: list[int] = token_ids.tolist()
        self._logprobs: list[Logprobs | None] = [None] * len(token_ids)

    def take(self, part: PromptLogprobs) -> None:
        """A part, of a step that may be computed again after a retraction: with the same numbers."""
        self._logprobs[part.first : part.first + len(part.entries)] = part.entries

    def __iter__(self) -> Iterator[tuple[int, Logprobs | None]]:
        return iter(zip(self._token_ids, self._logprobs, strict=True))
