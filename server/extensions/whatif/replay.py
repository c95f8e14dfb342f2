"""Recorded requests through the real planner in virtual time.

Owns: virtual time, what stands for tokens, which requests are refused or time out.
Does not know: how long steps take, files, figures.

Requests arrive when they did, or in a closed loop as soon as one of so many clients is free; each gets as many tokens
as it got.  A step that is planned while another runs begins when that one is done, as on the device.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.messages import Admit, Step, StepDone, Tokens
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import PlannerLimits
from engine.traffic.sizes import NOTHING, StepSize, StepSizes
from engine.traffic.trace import DIGEST_BYTES, TracedRequest, TraceHead
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import Adapter, Origin
from server.extensions.whatif.changes import EOS, Case

TokenIds = npt.NDArray[np.int32]

FIRST_BLOCK, FIRST_TAIL = 1, 2  # odd numbers stand for blocks, even ones for what is behind a request's last block


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay.  ended: in the order of their ends.  refused: why, and how many.

    busy_s: of the device.  largest: of each quantity of a step, in any step."""

    ended: list[RequestMetrics] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_retractions: int = 0
    largest: StepSize = NOTHING


def stand_ins(requests: Sequence[TracedRequest], head: TraceHead) -> list[TokenIds]:
    """Tokens of each request's prompt and output that are equal in as many whole blocks as the real ones."""
    numbers: dict[bytes, int] = {}
    sequences = []
    for index, one in enumerate(requests):
        blocks = [one.blocks[at : at + DIGEST_BYTES] for at in range(0, len(one.blocks), DIGEST_BYTES)]
        named = np.array([numbers.setdefault(block, len(numbers)) for block in blocks], dtype=np.int32)
        whole = np.repeat(FIRST_BLOCK + 2 * named, head.block)
        tail = np.full(one.prompt + one.output - len(whole), FIRST_TAIL + 2 * index, dtype=np.int32)
        sequences.append(np.concatenate((whole, tail)).astype(np.int32))
    return sequences


class Replay:
    """One case.  seconds: how long a step takes.  concurrency: clients of a closed loop; 0 for recorded arrivals."""

    def __init__(
        self,
        case: Case,
        requests: Sequence[TracedRequest],
        tokens: Sequence[TokenIds],
        seconds: Callable[[StepSize], float],
        concurrency: int = 0,
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._seconds = seconds
        self._concurrency = concurrency
        self._limits = case.config.limits
        self._depth = case.config.scheduler.overlap_depth
        self._now = requests[0].at
        self._planner = case.planner(lambda: self._now)
        self._device = _Device(case.limits, requests, tokens)
        self._clients: Counter[str] = Counter()
        self._queued_tokens = 0
        self._open: set[int] = set()
        self._without_token: set[int] = set()
        # (when, request, whether it is only for those without a token)
        self._deadlines: list[tuple[float, int, bool]] = []
        self.result = Replayed()

    def run(self) -> Replayed:
        """Until all have ended."""
        planner, result, requests = self._planner, self.result, self._requests
        arriving = deque(range(len(requests)))
        answers: deque[tuple[float, StepDone]] = deque()
        free_at = began_at = self._now
        while True:
            while arriving and self._is_due(arriving[0]):
                self._arrive(arriving.popleft())
            while planner.num_in_flight < self._depth and (step := planner.next_step()) is not None:
                size = self._device.sizes.measure(step)
                took_s = self._seconds(size)
                free_at = max(free_at, self._now) + took_s
                answers.append((free_at, self._device.answer(step)))
                result.busy_s += took_s
                result.num_steps += 1
                result.largest = StepSize(*map(max, result.largest, size))
            next_arrival = requests[arriving[0]].at if arriving and not self._concurrency else np.inf
            due = min(answers[0][0] if answers else np.inf, next_arrival, self._next_deadline())
            if due == np.inf:
                break
            self._now = max(self._now, due)
            if answers and answers[0][0] <= due:
                planner.complete(answers.popleft()[1])
            self._read_outbox()
            self._expire()
            self._take_ended()
        assert not planner.num_open, f"{planner.num_open} requests can never run"
        result.seconds = self._now - began_at
        result.num_retractions = planner.meter.num_retractions
        return result

    def _is_due(self, index: int) -> bool:
        if self._concurrency:
            return len(self._open) < self._concurrency
        return self._requests[index].at <= self._now

    def _arrive(self, index: int) -> None:
        one, limits = self._requests[index], self._limits
        per_client = limits.max_requests_per_client
        if len(self._open) >= limits.max_requests:
            self.result.refused["limits.max_requests"] += 1
        elif self._open and self._queued_tokens + one.prompt > limits.max_queued_tokens:
            self.result.refused["limits.max_queued_tokens"] += 1
        elif per_client and self._clients[one.client] >= per_client:
            self.result.refused["limits.max_requests_per_client"] += 1
        else:
            self._admit(index, one)

    def _admit(self, index: int, one: TracedRequest) -> None:
        known = one.prompt + one.resumed
        params = SamplingParams(
            max_tokens=one.max_tokens,
            seed=index,  # by which the device knows whose row it is
            prompt_logprobs=0 if one.whole == "prompt_logprobs" else None,
            pooling="mean" if one.whole == "pooling" else "",
        )
        message = Admit(
            request_id=index,
            token_ids=self._tokens[index][:known].tobytes(),
            params=params,
            priority=one.priority,
            num_resumed=one.resumed,
            origin=Origin(client=one.client, tenant=one.tenant),
            adapter=Adapter(one.adapter, "") if one.adapter else None,
        )
        try:
            self._planner.admit(message)
        except RequestError as error:
            self.result.refused[error.code] += 1
            return
        self._open.add(index)
        self._without_token.add(index)
        self._clients[one.client] += 1
        self._queued_tokens += one.prompt
        first_s, whole_s = self._limits.first_token_timeout_s, self._limits.request_timeout_s
        if 0 < first_s < whole_s:
            heapq.heappush(self._deadlines, (self._now + first_s, index, True))
        # A client that left before a token came leaves again; one that had some is taken to have wanted no more.
        patience_s = one.e2e_s if one.finish == "abort" and not one.output else np.inf
        heapq.heappush(self._deadlines, (self._now + min(whole_s, patience_s), index, False))

    def _next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else np.inf

    def _expire(self) -> None:
        while self._next_deadline() <= self._now:
            _, index, only_without_token = heapq.heappop(self._deadlines)
            if not only_without_token or index in self._without_token:
                self._planner.abort(index)
                self._take_ended()

    def _read_outbox(self) -> None:
        for message in self._planner.outbox:
            if isinstance(message, Tokens):
                self._without_token.difference_update(message.cached_tokens)
        self._planner.outbox.clear()

    def _take_ended(self) -> None:
        for one in self._planner.finished:
            request = self._requests[one.request_id]
            self._open.discard(one.request_id)
            self._clients[request.client] -= 1
            self._queued_tokens -= request.prompt
        self.result.ended += self._planner.finished
        self._planner.finished.clear()


class _Device:
    """Says the tokens that a step samples: those of each row's request, and EOS behind them."""

    def __init__(self, limits: PlannerLimits, requests: Sequence[TracedRequest], tokens: Sequence[TokenIds]) -> None:
        self.sizes = StepSizes(limits.max_running)
        self._requests = requests
        self._tokens = tokens
        self._scripts = np.full((limits.max_running, limits.max_len + 1), EOS, dtype=np.int32)
        self._known = np.zeros(limits.max_running, dtype=np.int64)

    def answer(self, step: Step) -> StepDone:
        for admission in step.admissions:
            index = admission.params.seed or 0
            script, sequence = self._scripts[admission.row], self._tokens[index]
            script[:] = EOS
            script[: len(sequence)] = sequence[: len(script)]
            if self._requests[index].finish != "length" and self._requests[index].output:
                script[len(sequence) - 1] = EOS
            self._known[admission.row] = len(admission.token_ids) // 4
        segments = np.frombuffer(step.prefill_rows, dtype=np.int32)
        samples = np.frombuffer(step.prefill_samples, dtype=np.int32) == 1
        rows = np.concatenate((np.frombuffer(step.decode_rows, dtype=np.int32), segments[samples]))
        sampled = self._scripts[rows, self._known[rows]]
        self._known[rows] += 1
        return StepDone(rank=0, step_id=step.step_id, token_ids=sampled.tobytes())
