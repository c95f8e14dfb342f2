"""The ingress actor: clients' requests enter through it and their output leaves.

consumes: Deltas, Failed (tokenizer) · EngineReady, EngineRecovering, Stats (scheduler) · SettingsChanged, Stop (system)
  TokenizersReady, TokenizersLost (tokenizer pool, where there is one)
produces: Tokenize, Abort (tokenizer)
waits for: a message; never for a peer.   owns: request ids, seeds, deadlines, admission, one stream per client.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

from engine.actors.actor import Actor, Link
from engine.actors.admission import RETRY_AFTER_S, Load, check_admission, prompt_cost, read_params, read_prompt
from engine.actors.inboxes import IngressInbox
from engine.actors.operations import SettingsChanged
from engine.actors.stream import Stream
from engine.checkpoints.use import GENERATING, ModelUse
from engine.host.timeouts import is_set_within
from engine.messages import DEFAULT_OPTIONS, Abort, Delta, Deltas, Failed, Finish, RequestOptions, Tokenize
from engine.settings.sections import LimitsSection
from engine.types.errors import EngineDied, RequestError
from engine.types.notices import EngineReady, EngineRecovering, Stats, TokenizersLost, TokenizersReady
from engine.types.params import MAX_SEED, SamplingParams
from engine.types.prompt import Prompt

log = logging.getLogger(__name__)

Part = Literal["executors", "tokenizers"]


@dataclass(slots=True)
class _Open:
    """A request between its acceptance and its terminal event."""

    stream: Stream
    estimated_tokens: int
    timer: asyncio.TimerHandle


class Ingress(Actor[IngressInbox | SettingsChanged]):
    """Accepts or refuses requests at once; every accepted one ends in exactly one terminal event.

    parts: the parts that must report ready before requests are accepted; requests wait while one of them recovers.
    first_id: id of its first request, larger than those of a previous ingress.  use: the model's.
    loading: returns what a start does right now, '' if it is not known.
    settings_watchers: called when limits have changed."""

    def __init__(
        self,
        *,
        capacity: int,
        limits: LimitsSection,
        max_model_len: int,
        vocab_size: int,
        rng: random.Random,
        tokenizer: Link[Tokenize | Abort],
        parts: Iterable[Part] = ("executors",),
        first_id: int = 1,
        use: ModelUse = GENERATING,
        loading: Callable[[], str] = str,
    ) -> None:
        super().__init__("ingress", capacity)
        self.loading = loading
        self._missing: set[Part] = set(parts)
        self._limits = limits
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._use = use
        self._rng = rng
        self._tokenizer = tokenizer
        self._ids = itertools.count(first_id)
        self._open: dict[int, _Open] = {}
        # Cancelled requests that the engine has not released: they have no client but still count.
        self._leaving: dict[int, _Open] = {}
        self._queued_tokens = 0
        self.ready = False
        self.draining = False
        self.recovering = self.asleep = False
        self.failure: str | None = None
        self.stats: Stats | None = None
        self.settings_watchers: list[Callable[[SettingsChanged], None]] = []
        self.num_late_events = 0
        self.became_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the client side: called on the event loop ------------------------------------------

    def drain(self) -> None:
        """Accept no more requests."""
        self.draining = True

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._open)

    @property
    def num_leaving(self) -> int:
        """Cancelled requests that the engine has not released."""
        return len(self._leaving)

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> Stream:
        """Accept a request and return its stream.

        Raises RequestError: 503 when not serving, 429 when full, 400 when a value is out of range.
        """
        check_admission(self, self._limits)
        params = read_params(params, self._use, self._vocab_size)
        text, token_ids, turns = read_prompt(prompt, options, self._max_model_len, self._vocab_size)
        estimated = prompt_cost(text, token_ids, turns, options.chat.tools) + len(options.resumed) // 4
        Load(self.num_open, self.num_leaving, self._queued_tokens).check(self._limits, estimated)
        if params.seed is None:
            params = params.replace(seed=self._rng.randint(0, MAX_SEED))
        request_id = next(self._ids)
        self._tokenizer.put(
            Tokenize(request_id=request_id, params=params, text=text, token_ids=token_ids, turns=turns, options=options)
        )
        stream = Stream(request_id, self._cancel, estimated)
        self._open[request_id] = _Open(stream, estimated, self._first_timer(request_id))
        self._queued_tokens += estimated
        self._idle.clear()
        return stream

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if the time ran out first."""
        return await is_set_within(timeout_s, self._idle)

    def fail_all(self, error: EngineDied) -> None:
        """End every open request with the reason and accept no more, after the engine died."""
        self.failure = str(error)
        self.ready = False
        for request_id in list(self._open):
            self._end(request_id).stream.fail(error)
        for request_id in list(self._leaving):
            self._has_left(request_id)

    def abort_all(self) -> None:
        """Cancel every open request; each stream ends with an error (the drain timed out)."""
        for request_id in list(self._open):
            error = RequestError("the server is shutting down", status=503, code="shutting_down")
            self._abandon(request_id).stream.fail(error)

    def abort(self, request_id: int) -> bool:
        """End a request early; its reader gets the output so far and the finish reason 'abort'.

        Returns whether it was open."""
        if request_id not in self._open:
            return False
        self._abandon(request_id).stream.push(Delta(request_id=request_id, text="", finish=Finish.ABORT))
        return True

    def _cancel(self, request_id: int) -> None:
        if request_id in self._open:
            self._abandon(request_id)

    def _first_timer(self, request_id: int) -> asyncio.TimerHandle:
        loop, limits = asyncio.get_running_loop(), self._limits
        if 0 < limits.first_token_timeout_s < limits.request_timeout_s:
            return loop.call_later(limits.first_token_timeout_s, self._expect_output, request_id)
        return loop.call_later(limits.request_timeout_s, self._expire, request_id)

    def _expect_output(self, request_id: int) -> None:
        """Fail a request without output while there is time left to retry, here or elsewhere."""
        request, limits = self._open[request_id], self._limits
        if request.stream.has_output:
            left_s = limits.request_timeout_s - limits.first_token_timeout_s
            request.timer = asyncio.get_running_loop().call_later(left_s, self._expire, request_id)
            return
        error = RequestError(
            f"the request has had no token for {limits.first_token_timeout_s:g} s; try again later",
            status=503,
            code="queue_timeout",
            retry_after_s=RETRY_AFTER_S,
        )
        self._abandon(request_id).stream.fail(error)

    def _expire(self, request_id: int) -> None:
        error = RequestError(
            f"the request took longer than {self._limits.request_timeout_s:g} s", status=504, code="request_timeout"
        )
        self._abandon(request_id).stream.fail(error)

    def _abandon(self, request_id: int) -> _Open:
        """Close a request without a reader.  It counts until the engine reports its end."""
        self._tokenizer.put(Abort(request_id=request_id))
        request = self._leaving[request_id] = self._close(request_id)
        return request

    def _end(self, request_id: int) -> _Open:
        """Close an open request that the engine has released."""
        request = self._close(request_id)
        self._queued_tokens -= request.estimated_tokens
        return request

    def _close(self, request_id: int) -> _Open:
        """Remove a request from the open ones; the only place that does so."""
        request = self._open.pop(request_id)
        request.timer.cancel()
        if not self._open:
            self._idle.set()
        return request

    def _has_left(self, request_id: int) -> bool:
        """Forget a cancelled request that the engine has released; False if it is not one of those."""
        request = self._leaving.pop(request_id, None)
        if request is None:
            return False
        self._queued_tokens -= request.estimated_tokens
        return True

    # ---- the engine side: messages ----------------------------------------------------------

    def handle(self, message: IngressInbox | SettingsChanged) -> None:
        match message:
            case Deltas():
                self._deliver(message)
            case Failed():
                self._fail(message)
            case Stats():
                self.stats = message
            case EngineReady():
                self._part_is_ready("executors")
                self.asleep = False
            case TokenizersReady():
                self._part_is_ready("tokenizers")
            case EngineRecovering(reason=_, is_sleep=is_sleep):
                self._lost("executors")
                self.asleep = is_sleep
            case TokenizersLost():
                self._lost("tokenizers")
            case SettingsChanged(limits=limits):
                self._limits = limits
                for call in self.settings_watchers:
                    call(message)
            case _:
                assert_never(message)

    def _part_is_ready(self, part: Part) -> None:
        self._missing.discard(part)
        if not self._missing:
            self.ready = True
            self.recovering = False
            self.became_ready.set()

    def _lost(self, part: Part) -> None:
        self._missing.add(part)
        self.recovering = True  # requests are still accepted; they wait, as do those that ran

    def _deliver(self, message: Deltas) -> None:
        for delta in message.deltas:
            request = self._open.get(delta.request_id)
            if request is None:
                if delta.finish == Finish.RUNNING or not self._has_left(delta.request_id):
                    self.num_late_events += 1  # the client went away while this was under way
                continue
            request.stream.push(delta)
            if delta.finish != Finish.RUNNING:
                self._end(delta.request_id)

    def _fail(self, message: Failed) -> None:
        if message.request_id not in self._open:
            if not self._has_left(message.request_id):
                self.num_late_events += 1
            return
        error = RequestError(message.message, status=message.status, code=message.code, param=message.param)
        self._end(message.request_id).stream.fail(error)
