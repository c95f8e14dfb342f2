"""Requests that have not ended, the messages about them, and a forecast of how long their outputs will get.

Owns: each sequence from its arrival to its end, messages that wait to be sent, the meter, recent output lengths.
Does not know: rows, pages, steps.

Admission by a forecast instead of by max_tokens is what keeps the pool full: most requests stop long before their
limit.  The peak of future use follows Gong et al. 2025 (the "past-future" scheduler): requests that end sooner give
their pages back before the others have grown to their full length.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.messages import Admit, Failed, Finish, Tokens
from engine.scheduling.feature import PlannerParts
from engine.scheduling.meter import Meter, RequestMetrics
from engine.scheduling.rows import RowTable, Sequence
from engine.types.errors import RequestError

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

HISTORY = 512  # outputs remembered
FIRST_GUESS = 256  # tokens, before anything has ended
GOLDEN = (5**0.5 - 1) / 2
CAUTION_STEP = 0.25  # one retraction adds it to every expectation
MOST_CAUTION = 1.0
CAUTION_DECAY = 0.9  # an output that ends without a retraction multiplies the caution by it


class OutputForecast:
    """The expected lengths of outputs, drawn from the lengths of earlier ones that got as far.

    Each output is compared with a different earlier one, so that as many are expected to end early and late as did."""

    def __init__(self) -> None:
        self._lengths = np.full(HISTORY, FIRST_GUESS, dtype=np.int64)
        self._num_seen = 0
        self._caution = 0.0
        self._sorted: npt.NDArray[np.int64] | None = None

    def note_end(self, num_output: int) -> None:
        """Note the length of an output that ended by itself or at its limit."""
        self._lengths[self._num_seen % HISTORY] = num_output
        self._num_seen += 1
        self._caution *= CAUTION_DECAY
        self._sorted = None

    def note_retraction(self) -> None:
        """Note that pages ran out: expectations were too low."""
        self._caution = min(MOST_CAUTION, self._caution + CAUTION_STEP)

    def remaining(self, generated: Ints, most: Ints) -> Floats:
        """Return the expected number of tokens still to come, for outputs with ``generated`` tokens; at most ``most``.

        An output longer than all before it is expected to get twice as long as it is."""
        if self._sorted is None:
            self._sorted = np.sort(self._lengths[: max(1, min(self._num_seen, HISTORY))])
        first_longer = np.searchsorted(self._sorted, generated, side="right")
        num_longer = len(self._sorted) - first_longer
        # The golden ratio's multiples spread evenly over 0 to 1, however many there are.  With the mean for every one
        # all would end at once, and the pool would stay a quarter empty for a peak that never comes.
        spread = np.arange(1, len(generated) + 1) * GOLDEN % 1.0
        lengths = self._sorted[np.minimum(first_longer + (spread * num_longer).astype(np.int64), len(self._sorted) - 1)]
        expected = np.where(num_longer > 0, lengths - generated, generated)
        return np.minimum(expected * (1.0 + self._caution), most)

    def reserve(self, table: RowTable, sequence: Sequence, num_available: int) -> int:
        """Return the number of pages that must stay available when a sequence starts, for all that run to grow.

        0 if it would run alone: it fits, by the check at its arrival."""
        rows, page_size = np.flatnonzero(table.running), table.page_size
        if not len(rows):
            return 0
        num_tokens = len(sequence.tokens)
        # The sequence itself comes last.
        known = np.append(table.num_known[rows], num_tokens)
        num_pages = np.append(table.num_pages[rows], -(-num_tokens // page_size))
        generated = known - np.append(table.num_prompt[rows], sequence.num_prompt)
        most = np.append(table.max_total[rows], sequence.max_total) - known
        slack = num_pages * page_size - known
        worst = int(np.maximum(-(-(most - slack) // page_size), 0).sum())
        if worst + int(num_pages[-1]) <= num_available:
            return worst
        # One page for each sequence that may still want one, whatever the forecast is.
        at_least = int((most > slack).sum())
        given_back = num_pages - np.append(table.num_shared[rows], 0)
        growth = peak_growth(self.remaining(generated, most), slack, given_back, page_size)
        return min(worst, max(at_least, round(growth)))


def peak_growth(remaining: Floats, slack: Ints, given_back: Ints, page_size: int) -> float:
    """Return the most pages that a batch will need beyond those that it holds, at the worst of its sequences' ends.

    Per sequence: remaining tokens, slack (tokens that still fit its pages), pages that its end gives back."""
    if not len(remaining):
        return 0.0
    order = np.argsort(remaining, kind="stable")  # the same on every machine
    ends = remaining[order]
    num_alive = np.arange(len(ends), 0, -1)
    # The sum of the slacks of sequences alive at each end; half a page each for what rounding up costs on average.
    slack_alive = np.cumsum(slack[order][::-1])[::-1]
    grown = (num_alive * ends - slack_alive) / page_size + 0.5 * num_alive
    back = np.cumsum(given_back[order]) - given_back[order]
    return float(max((grown - back).max(), 0.0))


class Requests:
    """Open requests by id, in the order of their arrival.

    ``outbox`` collects messages for the tokenizer, ``finished`` records for observers; the planner's caller empties
    both.  open_since: arrival of the first request after none was open."""

    def __init__(self, parts: PlannerParts, forecast: OutputForecast, meter: Meter) -> None:
        self.open: dict[int, Sequence] = {}
        self.outbox: list[Tokens | Failed] = []
        self.finished: list[RequestMetrics] = []
        self.meter = meter
        self.open_since = 0.0
        self.limits = parts.limits
        self._forecast = forecast
        self._features = parts.features
        self._events = parts.events
        self._clock = parts.clock
        self._num_arrived = 0

    @property
    def due_since(self) -> float:
        """Time from which on the completion of a step is due, provided that requests are open."""
        return max(self.open_since, self.meter.last_completed_at)

    @property
    def most_total(self) -> int:
        """The most tokens that an open request can reach; 0 if none is open."""
        return max((sequence.max_total for sequence in self.open.values()), default=0)

    def take_over(self, other: "Requests") -> list[Sequence]:
        """Take over the requests and counters of another object, which is not used again.  Return those that go on.

        A request for which there is no room ends with an error; ``most_total`` shows in advance if there is one."""
        self.open, self.meter = other.open, other.meter
        self.outbox += other.outbox
        self.finished += other.finished
        self.open_since, self._num_arrived = other.open_since, other._num_arrived
        for sequence in list(self.open.values()):
            if sequence.max_total > self.limits.longest:
                self.end(sequence, Finish.ERROR, len(sequence.tokens))
                reason = "the KV pool has become too small for this request; send it again with a smaller max_tokens"
                self.outbox.append(
                    Failed(request_id=sequence.request_id, message=reason, status=503, code="pool_too_small")
                )
        return list(self.open.values())

    def take_in(self, message: Admit) -> Sequence:
        """Return the sequence of a new request, not yet open.  Raises RequestError if it could never run."""
        tokens = np.frombuffer(message.token_ids, dtype=np.int32)
        params = message.params
        num_prompt = len(tokens) - message.num_resumed
        max_total = self.limits.max_total(num_prompt, params.max_tokens)
        if message.num_resumed and len(tokens) >= max_total:
            most = max_total - num_prompt
            raise RequestError(
                f"the output to continue has {message.num_resumed} tokens, and the request may get at most {most}",
                code="not_resumable",
            )
        stop_ids = () if params.ignore_eos else self.limits.eos_token_ids
        sequence = Sequence(
            request_id=message.request_id,
            arrival=self._num_arrived,
            priority=message.priority,
            params=params,
            tokens=tokens,
            num_prompt=num_prompt,
            max_total=max_total,
            stop_ids=tuple(dict.fromkeys(stop_ids + params.stop_token_ids)),
            arrived_at=self._clock(),
            cache_salt=message.cache_salt,
            origin=message.origin,
        )
        self._num_arrived += 1
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Open a request."""
        if not self.open:
            self.open_since = sequence.arrived_at
        self.open[sequence.request_id] = sequence

    def started(self, sequences: Iterable[Sequence], now: float) -> None:
        """Note that requests have rows from now on."""
        for sequence in sequences:
            is_first = sequence.started_at is None
            if is_first:
                sequence.started_at = now
            for started in self._events.started:
                started(sequence, is_first=is_first)

    def retracted(self, sequence: Sequence) -> None:
        """Note that a request has lost its row to others."""
        sequence.num_retractions += 1
        for retracted in self._events.retracted:
            retracted(sequence)

    def send_end(self, request_id: int, finish: Finish) -> None:
        """Send the end of a request without a token."""
        self.outbox.append(
            Tokens(
                request_ids=np.array([request_id], dtype=np.int64).tobytes(),
                token_ids=np.array([-1], dtype=np.int32).tobytes(),
                finishes=bytes([finish]),
            )
        )

    def end(self, sequence: Sequence, finish: Finish, num_tokens: int) -> None:
        """End a request, with that many tokens of prompt and output."""
        del self.open[sequence.request_id]
        for ended in self._features.ended:
            ended(sequence)
        num_output = num_tokens - sequence.num_prompt
        if finish in (Finish.STOP, Finish.LENGTH):
            self._forecast.note_end(num_output)
        now, first, arrived = self._clock(), sequence.first_token_at, sequence.arrived_at
        metrics = RequestMetrics(
            request_id=sequence.request_id,
            finish=finish,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=num_output,
            cached_tokens=max(0, sequence.num_cached_at_start),
            num_retractions=sequence.num_retractions,
            arrived_at=arrived,
            queue_s=sequence.started_at - arrived if sequence.started_at is not None else None,
            ttft_s=first - arrived if first is not None else None,
            tpot_s=(now - first) / (num_output - 1) if first is not None and num_output > 1 else None,
            e2e_s=now - arrived,
            priority=sequence.priority,
            client=sequence.origin.client,
            client_request_id=sequence.origin.request,
        )
        for finished in self._events.finished:
            finished(sequence, metrics)
        self.finished.append(metrics)
