"""The planner's numbers: counters, distributions, the last steps, and what one request cost.

Owns: those numbers, which only grow, and the record that observers get.
Does not know: where, when and under which names they are shown.
Noting costs per event (a request started or ended, a step completed), never per running request: all rows of a decode
step waited equally long for their token, so a whole step is one entry with a weight.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine.messages import Finish
from engine.scheduling.rows import Sequence

NUM_RECENT_STEPS = 256
SPAN_S = 5.0
NUM_SPANS = 120  # ten minutes

# The same edges as other engines where they fit, so that dashboards look familiar; the last bucket has no upper edge.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
LONG_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = tuple(float(1 << power) for power in range(18))  # 1 to 131,072


class Distribution(msgspec.Struct):
    """A histogram.  edges: ascending.  counts: entry i counts values above edges[i - 1] and at most edges[i]."""

    edges: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    def note(self, value: float, weight: int = 1) -> None:
        """Count a value, ``weight`` times."""
        self.counts[bisect_left(self.edges, value)] += weight
        self.total += value * weight

    @property
    def num_seen(self) -> int:
        """Number of values counted."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """A request that has ended.  Times are seconds of the scheduler's clock.

    arrived_at: arrival at the scheduler.
    queue_s: time until the first step that computes some of it was planned.
    ttft_s: time from arrival to its first token; None if it got none.
    tpot_s: mean time between its tokens after the first; None if there were none.
    cached_tokens: prompt tokens that needed no computing when it first ran.
    num_retractions: number of times that it lost its row and was queued again.
    priority: as it was sent.
    client: the name of its key, or its address; '' for a request of the program itself.
    client_request_id: its X-Request-Id, or the one drawn for it and sent back.  A request with several choices has
    one client_request_id, and one request_id for each choice.
    model: the name under which the model is served.
    ended_at_unix_s: end by the wall clock."""

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
    priority: int = 0
    client: str = ""
    client_request_id: str = ""
    model: str = ""
    ended_at_unix_s: float = 0.0


class StepRecord(NamedTuple):
    """A step that has completed.  Times are seconds of the planner's clock.

    began_at: time when the device was free for it.
    num_decodes: tokens of rows that decode, including proposed ones.
    num_prefills: number of prompts in it.  num_prefill_tokens: number of their tokens.
    num_next: sampled tokens of requests that had one before.  num_first: sampled tokens of requests that had none.
    note: the executor's explanation of a step that took longer; '' for none.
    num_copied: pages that features copied before it."""

    step_id: int
    began_at: float
    completed_at: float
    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    num_next: int = 0
    num_first: int = 0
    note: str = ""
    num_copied: int = 0


class Span(msgspec.Struct):
    """The steps that completed within ``SPAN_S`` seconds, from ``number`` * ``SPAN_S`` on.

    busy_s: seconds that the device was busy.  most_rows: rows of the largest of these steps."""

    number: int
    num_steps: int = 0
    num_output_tokens: int = 0
    num_prefill_tokens: int = 0
    most_rows: int = 0
    busy_s: float = 0.0


def _over(edges: tuple[float, ...]) -> Distribution:
    """Return a field whose default is an empty distribution with these edges."""
    return msgspec.field(default_factory=lambda: Distribution(edges))


class Meter(msgspec.Struct):
    """All counters of a planner, encodable as they are.

    num_prompt_tokens, num_cached_tokens: tokens of requests that have started.
    num_output_tokens: tokens sampled and kept.
    last_completed_at: completion of the last step, by the planner's clock; before the first one, the start of counting.
    proposed_at: number of tokens proposed as the first, second ... of their step.
    accepted_at: the number of those that were right.
    recent_steps: the last ``NUM_RECENT_STEPS`` steps, oldest first.
    history: the last ``NUM_SPANS`` spans that had steps.
    """

    last_completed_at: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_retractions: int = 0
    proposed_at: list[int] = []
    accepted_at: list[int] = []
    num_ended: dict[Finish, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Finish, 0))
    queue_s: Distribution = _over(LONG_S)
    ttft_s: Distribution = _over(LONG_S)
    itl_s: Distribution = _over(SHORT_S)
    tpot_s: Distribution = _over(SHORT_S)
    e2e_s: Distribution = _over(LONG_S)
    prefill_s: Distribution = _over(LONG_S)
    decode_s: Distribution = _over(LONG_S)
    inference_s: Distribution = _over(LONG_S)
    step_s: Distribution = _over(SHORT_S)
    prompt_tokens: Distribution = _over(TOKENS)
    output_tokens: Distribution = _over(TOKENS)
    step_tokens: Distribution = _over(TOKENS)
    recent_steps: list[StepRecord] = []
    history: list[Span] = []

    # ---- events, as in ``PlannerWatcher`` ---------------------------------------------------

    def started(self, sequence: Sequence, *, is_first: bool) -> None:
        """Count a request that starts for the first time."""
        if is_first and sequence.started_at is not None:
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.num_cached_at_start
            self.prompt_tokens.note(sequence.num_prompt)
            self.queue_s.note(sequence.started_at - sequence.arrived_at)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Count the time to a first token."""
        self.ttft_s.note(now - sequence.arrived_at)

    def retracted(self, sequence: Sequence) -> None:
        """Count a retraction."""
        self.num_retractions += 1

    def completed(self, step: StepRecord) -> None:
        """Count a step and its tokens."""
        if step.num_next:
            self.itl_s.note(step.completed_at - self.last_completed_at, step.num_next)
        self.last_completed_at = step.completed_at
        self.num_steps += 1
        self.num_output_tokens += step.num_next + step.num_first
        self.step_s.note(step.completed_at - step.began_at)
        self.step_tokens.note(step.num_decodes + step.num_prefill_tokens)
        self.recent_steps.append(step)
        if len(self.recent_steps) > NUM_RECENT_STEPS:
            del self.recent_steps[0]
        self._remember(step, step.num_next + step.num_first)

    def _remember(self, step: StepRecord, num_tokens: int) -> None:
        number = int(step.completed_at // SPAN_S)
        if not self.history or self.history[-1].number != number:
            self.history.append(Span(number))
            if len(self.history) > NUM_SPANS:
                del self.history[0]
        span = self.history[-1]
        span.num_steps += 1
        span.num_output_tokens += num_tokens
        span.num_prefill_tokens += step.num_prefill_tokens
        span.most_rows = max(span.most_rows, step.num_decodes + step.num_prefills)
        span.busy_s += step.completed_at - step.began_at

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """Count the proposals for one request that a step has verified."""
        for counts, num in ((self.proposed_at, num_proposed), (self.accepted_at, num_accepted)):
            counts.extend([0] * (num_proposed - len(counts)))
            for place in range(num):
                counts[place] += 1

    def followed(self, num_tokens: int) -> None:
        """Count the tokens of a step that follow its first one for the same requests."""
        self.num_output_tokens += num_tokens
        self.itl_s.note(0.0, num_tokens)

    def finished(self, sequence: Sequence, request: RequestMetrics) -> None:
        """Count a request that has ended."""
        self.num_ended[request.finish] += 1
        self.e2e_s.note(request.e2e_s)
        self.output_tokens.note(request.num_output_tokens)
        if request.tpot_s is not None:
            self.tpot_s.note(request.tpot_s)
        if request.queue_s is not None:
            self.inference_s.note(request.e2e_s - request.queue_s)
        if request.queue_s is not None and request.ttft_s is not None:
            self.prefill_s.note(request.ttft_s - request.queue_s)
            self.decode_s.note(request.e2e_s - request.ttft_s)
