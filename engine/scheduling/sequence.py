"""A sequence: the token side of one request, as the scheduler knows it outside of a step, and what it must fit.

Owns: what survives a retraction, limits that stay as they are.  Does not know: rows of other sequences, pages, text.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError
from engine.params import SamplingParams

TokenIds = npt.NDArray[np.int32]

WORTH_WAITING_TOKENS = 32  # what a prefix that is not cached yet must save to be waited for


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


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Numbers the planner works with.

    max_running: rows.  max_step_tokens: of a step, decodes and prefill chunks together.  prefill_chunk: most tokens
    of one prompt in a step, and what each prompt gets in its turn.  max_len: tokens of prompt and output.
    eos_token_ids: of the model.  num_host_pages: pages in the host tier, 0 for none.
    itl_target_s: prefills are cut so that running requests get a token this often; 0 for no such target.
    fair_prefill: prompts take turns; if not, the oldest is finished first.
    record_events: collect what happens to cached pages; somebody must drain it then.
    store_timeout_s: how long a prompt waits for pages from the store; 0 where there is none.
    num_ranks: executors, each of which has a part of every page.
    scored_chunk: most tokens of a prompt in a step if log probabilities of all of them are wanted, which take memory of
    vocabulary size each."""

    max_running: int
    max_step_tokens: int
    prefill_chunk: int
    page_size: int
    num_pages: int
    max_len: int
    eos_token_ids: tuple[int, ...]
    num_host_pages: int = 0
    itl_target_s: float = 0.0
    fair_prefill: bool = True
    record_events: bool = False
    scored_chunk: int = 64
    store_timeout_s: float = 0.0
    num_ranks: int = 1

    def max_total(self, num_prompt: int, max_tokens: int | None) -> int:
        """Prompt plus most output tokens, refused at once where it can never fit."""
        # The last token is sampled but never computed, so it needs no slot.
        pool_len = self.num_pages * self.page_size + 1
        longest = min(self.max_len, pool_len)
        total = longest if max_tokens is None else num_prompt + max_tokens
        if num_prompt < 1:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if num_prompt >= longest or total > longest:
            what = f"{num_prompt} prompt tokens" + (f" plus max_tokens={max_tokens}" if max_tokens else "")
            bound = (
                f"the model's context of {self.max_len} tokens"
                if longest == self.max_len
                else f"the KV pool of {self.num_pages} pages x {self.page_size} tokens (raise kv.num_pages)"
            )
            raise RequestError(
                f"{what} exceed {bound}; shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
                param="prompt" if num_prompt >= longest else "max_tokens",
            )
        return total
