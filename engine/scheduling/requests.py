"""Requests that have not ended, and what others must hear of all of them.

Owns: each sequence from its arrival to its end, messages that wait to be sent, the meter.
Does not know: rows, pages, steps.
"""

from collections.abc import Callable

import numpy as np

from engine.messages import Admit, Failed, Finish, Tokens
from engine.scheduling.forecast import OutputForecast
from engine.scheduling.meter import Meter, RequestMetrics
from engine.scheduling.quarantine import Quarantine
from engine.scheduling.sequence import PlannerLimits, Sequence


class Requests:
    """Open requests by id, in the order of their arrival.

    ``outbox`` collects what the tokenizer must hear, ``finished`` what observers may; whoever calls the planner empties
    them.  open_since: when the first of those that are open now arrived."""

    def __init__(
        self, limits: PlannerLimits, forecast: OutputForecast, quarantine: Quarantine, clock: Callable[[], float]
    ) -> None:
        self.open: dict[int, Sequence] = {}
        self.outbox: list[Tokens | Failed] = []
        self.finished: list[RequestMetrics] = []
        self.meter = Meter(clock())
        self.open_since = 0.0
        self._limits = limits
        self._forecast = forecast
        self._quarantine = quarantine
        self._clock = clock
        self._num_arrived = 0

    def take_in(self, message: Admit) -> Sequence:
        """The sequence of a new request, not yet open.  Raises RequestError if it could never run."""
        tokens = np.frombuffer(message.token_ids, dtype=np.int32)
        params = message.params
        stop_ids = () if params.ignore_eos else self._limits.eos_token_ids
        sequence = Sequence(
            request_id=message.request_id,
            arrival=self._num_arrived,
            priority=message.priority,
            params=params,
            tokens=tokens,
            num_prompt=len(tokens),
            max_total=self._limits.max_total(len(tokens), params.max_tokens),
            stop_ids=tuple(dict.fromkeys(stop_ids + params.stop_token_ids)),
            arrived_at=self._clock(),
            cache_salt=message.cache_salt,
        )
        self._num_arrived += 1
        return sequence

    def add(self, sequence: Sequence) -> None:
        """The request is open."""
        if not self.open:
            self.open_since = sequence.arrived_at
        self.open[sequence.request_id] = sequence

    def end(self, sequence: Sequence, finish: Finish, num_tokens: int) -> None:
        """Forget a request, with that many tokens of prompt and output."""
        del self.open[sequence.request_id]
        self._quarantine.forget(sequence)
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
        )
        self.meter.ended(metrics)
        self.finished.append(metrics)
