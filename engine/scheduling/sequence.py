"""A sequence: the token side of one request, as the scheduler knows it outside of a step.

Owns: what survives a retraction.  Does not know: rows of other sequences, pages, text.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.params import SamplingParams

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens, limits and history; what a policy may look at, see ``engine/scheduling/policy.py``.

    arrival: position in the order of admission; decides among equals.
    tokens: prompt and output known when the sequence last stood in the queue (the row table has newer ones).
    num_prompt: how many of them are the prompt.  max_total: prompt plus most output tokens.
    stop_ids: token ids that end it.  row: its line in the row table, -1 while it waits.
    cache_salt: only sequences with the same one share pages.
    num_cached_at_start: prompt tokens that needed no computing when it first ran, -1 until then.
    arrived_at, started_at, first_token_at: by the scheduler's clock; None until then.
    """

    request_id: int
    arrival: int
    priority: int
    params: SamplingParams
    tokens: TokenIds
    num_prompt: int
    max_total: int
    stop_ids: tuple[int, ...]
    arrived_at: float
    row: int = -1
    cache_salt: str = ""
    num_cached_at_start: int = -1
    num_retractions: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached_now: int = 0
    num_overtaken: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to compute or to find in the cache before it can sample."""
        return len(self.tokens)
