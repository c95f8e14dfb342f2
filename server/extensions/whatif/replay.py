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

from engine.actors.admission import Load
from engine.features.traffic.sizes import NOTHING, StepSize, StepSizes
from engine.features.traffic.trace import DIGEST_BYTES, TracedRequest, TraceHead
from engine.messages import Admission, Admit, Step, Tokens
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.playback import Playback
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import Origin, RequestPart
from server.extensions.whatif.changes import Case

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


class TraceReplay:
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
        self._step_seconds = seconds
        self._concurrency = concurrency
        self._limits = case.config.limits
        self._sizes = StepSizes(case.limits.max_running)
        depth = case.config.scheduler.overlap_depth
        self._playback = Playback(case.planner, self._script, self._seconds, depth=depth, now=requests[0].at)
        self._planner = self._playback.planner
        self._arriving = deque(range(len(requests)))
        self._clients: Counter[str] = Counter()
        self._queued_tokens = 0
        self._open: set[int] = set()
        self._without_token: set[int] = set()
        # (when, request, whether it is only for those without a token)
        self._deadlines: list[tuple[float, int, bool]] = []
        self.result = Replayed()

    def run(self) -> Replayed:
        """Until all have ended."""
        for due in self._playback.times(self._arrive_due):
            self._playback.advance(due)
            self._read_outbox()
            self._expire()
            self._take_ended()
        assert not self._planner.num_open, f"{self._planner.num_open} requests can never run"
        self.result.seconds = self._playback.now - self._requests[0].at
        self.result.num_retractions = self._planner.meter.num_retractions
        return self.result

    def _seconds(self, step: Step) -> float:
        size, result = self._sizes.measure(step), self.result
        took_s = self._step_seconds(size)
        result.busy_s += took_s
        result.num_steps += 1
        result.largest = StepSize(*map(max, result.largest, size))
        return took_s

    def _script(self, admission: Admission) -> TokenIds:
        """A request's tokens, with EOS in the place of the last one unless the length ended it."""
        index = admission.params.seed or 0
        one, sequence = self._requests[index], self._tokens[index]
        return sequence[:-1] if one.finish != "length" and one.output else sequence

    def _arrive_due(self) -> float:
        while self._arriving and self._is_due(self._arriving[0]):
            self._arrive(self._arriving.popleft())
        is_timed = self._arriving and not self._concurrency
        return min(self._requests[self._arriving[0]].at if is_timed else np.inf, self._next_deadline())

    def _is_due(self, index: int) -> bool:
        if self._concurrency:
            return len(self._open) < self._concurrency
        return self._requests[index].at <= self._playback.now

    def _arrive(self, index: int) -> None:
        one = self._requests[index]
        load = Load(len(self._open), 0, self._queued_tokens, self._clients[one.client])
        if limit := load.refusal(self._limits, one.prompt):
            self.result.refused[f"limits.{limit}"] += 1
        else:
            self._admit(index, one)

    def _admit(self, index: int, one: TracedRequest) -> None:
        known = one.prompt + one.resumed
        params = SamplingParams(
            max_tokens=one.max_tokens,
            seed=index,  # by which the device knows whose row it is
            whole_prompt=bool(one.whole),
        )
        message = Admit(
            request_id=index,
            token_ids=self._tokens[index][:known].tobytes(),
            params=params,
            priority=one.priority,
            num_resumed=one.resumed,
            origin=Origin(client=one.client, tenant=one.tenant),
            parts={name: RequestPart(digest) for name, digest in one.parts.items()},
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
            heapq.heappush(self._deadlines, (self._playback.now + first_s, index, True))
        # A client that left before a token came leaves again; one that had tokens is taken to have wanted no more.
        patience_s = one.e2e_s if one.finish == "abort" and not one.output else np.inf
        heapq.heappush(self._deadlines, (self._playback.now + min(whole_s, patience_s), index, False))

    def _next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else np.inf

    def _expire(self) -> None:
        while self._next_deadline() <= self._playback.now:
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
