"""What one request cost and how long it took, by the scheduler's clock.

Owns: the record that observers get.  Does not know: who observes.
"""

from dataclasses import dataclass

from engine.messages import Finish


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """A request that has ended.  Times are seconds of the scheduler's clock.

    arrived_at: when the scheduler got it.  queue_s: until the first step that computed some of it was planned.
    ttft_s: from arrival to its first token; tpot_s: mean time between its tokens after the first; None where there
    was no such token.  cached_tokens: prompt tokens that needed no computing when it first ran.
    num_retractions: how often it lost its row and had to come back."""

    request_id: int
    finish: Finish
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int
    num_retractions: int
    arrived_at: float
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
