"""Messages for the state of an engine: a snapshot of one moment, finished requests, and the requests for both.

Owns: the form of these messages.  Does not know: the sources and readers of the numbers.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from engine.scheduling.board import Board
from engine.scheduling.meter import Meter, RequestMetrics
from engine.types.notices import Message


class MailboxGauges(msgspec.Struct, frozen=True):
    """The state of one actor's queue.

    peak: most messages delivered at once.  num_taken: messages delivered in total, 0 if it is in another process."""

    name: str
    waiting: int
    peak: int
    capacity: int
    num_taken: int = 0


class Gauges(msgspec.Struct, frozen=True):
    """The state of the engine.  Free, cached and used pages add up to the pool; each holds ``page_size`` tokens.

    num_in_flight: steps planned and not yet completed.  stalled_s: how long steps have been due and none completed, 0
    where nothing runs.  num_late_events: output for clients that had left.  num_tokenizers: that take requests now.
    process: the engine's.  of_features: numbers of features, by name.
    running_adapters, waiting_adapters: digests of the adapters of requests in and out of the batch.
    """

    num_open: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_used: int = 0
    page_size: int = 0
    num_in_flight: int = 0
    stalled_s: float = 0.0
    num_restarts: int = 0
    num_tokenizers: int = 1
    num_tokenizer_restarts: int = 0
    num_front_restarts: int = 0
    num_late_events: int = 0
    recovering: bool = False
    process: int = 0
    of_features: dict[str, int] = {}
    running_adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    mailboxes: tuple[MailboxGauges, ...] = ()


Views = Mapping[str, bytes]
NO_VIEWS: Final[Views] = {}


class GetSnapshot(Message, frozen=True, kw_only=True):
    """A request for the engine's state.  The answer, a ``Snapshot``, has the same number.

    meter: include all counters.
    board: include the place of every request and the content of every page.
    views: include views of features: name -> its argument, as MessagePack."""

    number: int = 0
    meter: bool = False
    board: bool = False
    views: dict[str, bytes] = msgspec.field(default_factory=dict)


class Subscribe(Message, frozen=True, kw_only=True):
    """Send ``RequestsFinished`` for every request that ends from now on."""


class Snapshot(Message, frozen=True, kw_only=True):
    """The answer to ``GetSnapshot``.  number: that of the request.  now: seconds on the clock of the meter's times.

    meter: what has been counted, None until the model is loaded, or where it was not asked for.
    board: empty until then, or where it was not asked for.
    views: the requested views of features that there are, as MessagePack."""

    number: int
    now: float
    gauges: Gauges
    meter: Meter | None = None
    board: Board = Board()
    views: dict[str, bytes] = msgspec.field(default_factory=dict)


class RequestsFinished(Message, frozen=True, kw_only=True):
    """Requests that have ended, sent to subscribers (``Subscribe``)."""

    requests: tuple[RequestMetrics, ...]
