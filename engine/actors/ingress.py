"""The ingress actor: where clients' requests enter and their output leaves.

consumes: Deltas, Failed (tokenizer) · EngineReady, EngineRecovering, Stats (scheduler) · Stop (system)
  TokenizersReady, TokenizersLost (tokenizer pool, where there is one)
produces: Tokenize, Abort (tokenizer)
waits for: a message; never for a peer.   owns: request ids, seeds, deadlines, admission, one stream per client.

Whether any request can be taken now, whatever it asks, is ``check_admission``: the server asks before it reads a body,
and ingress asks again when the request gets there.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, assert_never

import numpy as np

from engine.actors.actor import Actor, Link
from engine.actors.stream import Stream
from engine.errors import EngineDied, FieldError, RequestError
from engine.messages import (
    DEFAULT_OPTIONS,
    Abort,
    ChatTurn,
    Delta,
    Deltas,
    EngineReady,
    EngineRecovering,
    Failed,
    Finish,
    IngressInbox,
    Prompt,
    RequestOptions,
    Stats,
    Tokenize,
    TokenizersLost,
    TokenizersReady,
)
from engine.params import MAX_SEED, SamplingParams
from engine.sections import LimitsSection

RETRY_AFTER_S = 1  # a queue place can free up with the next step
RETRY_LATER_S = 5  # a model loads, or another server takes over
log = logging.getLogger(__name__)
Part = Literal["executors", "tokenizers"]
CHARS_PER_TOKEN = 4  # for the admission estimate only; English text and code have three to five
MAX_CHARS_PER_TOKEN = 8  # no prompt within the context is longer than this in practice; bounds the tokenizer's work


class Admitting(Protocol):
    """What takes requests: ingress.  num_leaving: cancelled requests that the engine has not let go of.

    ready: the model is loaded.  failure: why the engine died, once it has."""

    ready: bool
    draining: bool
    failure: str | None

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""

    @property
    def num_leaving(self) -> int: ...


def unavailable(ingress: Admitting) -> RequestError | None:
    """Returns why no request can be taken until the engine's state changes, or None."""
    if ingress.failure is not None:
        reason, code = "the engine has stopped", "engine_died"
    elif ingress.draining:
        reason, code = "the server is shutting down", "draining"
    elif not ingress.ready:
        reason, code = "the model is loading", "not_ready"
    else:
        return None
    error = RequestError(reason, status=503, code=code, retry_after_s=RETRY_LATER_S)
    if ingress.failure is not None:
        error.add_note(ingress.failure)  # for callers in Python: a response over HTTP does not tell it
    return error


def check_admission(ingress: Admitting, max_requests: int) -> None:
    """Raise RequestError if no request can be taken: 503 when not serving, 429 when full."""
    if (error := unavailable(ingress)) is not None:
        raise error
    if ingress.num_open + ingress.num_leaving >= max_requests:
        leaving = f", {ingress.num_leaving} cancelled ones are leaving," if ingress.num_leaving else ""
        raise queue_full(f"{ingress.num_open} requests are open{leaving} and no more than {max_requests} are accepted")


def queue_full(reason: str) -> RequestError:
    """The refusal of a request for which there is no room now."""
    return RequestError(f"{reason}; try again later", status=429, code="queue_full", retry_after_s=RETRY_AFTER_S)


class _Open:
    """A request between its acceptance and its terminal event."""

    __slots__ = ("estimated_tokens", "stream", "timer")

    def __init__(self, stream: Stream, estimated_tokens: int, timer: asyncio.TimerHandle) -> None:
        self.stream = stream
        self.estimated_tokens = estimated_tokens
        self.timer = timer


class Ingress(Actor[IngressInbox]):
    """Accepts or refuses requests at once; every accepted one ends in exactly one terminal event.

    parts: what must say that it is ready before requests are taken; they wait while one of them recovers.
    first_id: of its first request, if another ingress has had those before."""

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
    ) -> None:
        super().__init__("ingress", capacity)
        self._missing: set[Part] = set(parts)
        self._limits = limits
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._rng = rng
        self._tokenizer = tokenizer
        self._ids = itertools.count(first_id)
        self._open: dict[int, _Open] = {}
        # Cancelled, and not yet let go of by the engine: they have no client and still take room.
        self._leaving: dict[int, _Open] = {}
        self._queued_tokens = 0
        self.ready = False
        self.draining = False
        self.recovering = False
        self.failure: str | None = None
        self.stats: Stats | None = None
        self.num_late_events = 0
        self.became_ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the client side: called on the event loop ------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._open)

    @property
    def num_leaving(self) -> int:
        """Cancelled requests that the engine has not let go of."""
        return len(self._leaving)

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> Stream:
        """Accept a request and return its stream.

        Raises RequestError: 503 when not serving, 429 when full, 400 when a value is out of range.
        """
        check_admission(self, self._limits.max_requests)
        params.check(self._vocab_size)
        message = self._read_prompt(prompt, options.chat.tools)
        estimated = self._admission_cost(message)
        if params.seed is None:
            params = params.replace(seed=self._rng.randint(0, MAX_SEED))
        request_id = next(self._ids)
        text, token_ids, turns = message
        self._tokenizer.put(Tokenize(request_id, params, text=text, token_ids=token_ids, turns=turns, options=options))
        stream = Stream(request_id, self._cancel)
        self._open[request_id] = _Open(stream, estimated, self._first_timer(request_id))
        self._queued_tokens += estimated
        self._idle.clear()
        return stream

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if the time ran out first."""
        if not self._idle.is_set():
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def fail_all(self, error: EngineDied) -> None:
        """The engine is gone: end every open request with the reason and accept no more."""
        self.failure = str(error)
        self.ready = False
        for request_id in list(self._open):
            self._end(request_id).stream.fail(error)
        for request_id in list(self._leaving):
            self._has_left(request_id)

    def abort_all(self) -> None:
        """Cancel every open request; each stream ends with an error that says so (drain ran out of time)."""
        for request_id in list(self._open):
            error = RequestError("the server is shutting down", status=503, code="shutting_down")
            self._abandon(request_id).stream.fail(error)

    def abort(self, request_id: int) -> bool:
        """End a request where it is; its reader gets what was produced and a finish that says so.

        Returns whether it was open."""
        if request_id not in self._open:
            return False
        self._abandon(request_id).stream.push(Delta(request_id, "", finish=Finish.ABORT))
        return True

    def _read_prompt(self, prompt: Prompt, tools: str) -> tuple[str | None, bytes | None, tuple[ChatTurn, ...] | None]:
        """(text, token ids, turns), exactly one of them set."""
        if isinstance(prompt, str):
            self._check_chars(len(prompt))
            return str.__str__(prompt), None, None  # without what a subclass, such as NumPy's, adds to it
        if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn):
            turns: tuple[ChatTurn, ...] = prompt
            self._check_chars(sum(map(_num_chars, turns)) + len(tools))
            return None, None, turns
        return None, self._check_ids(prompt).tobytes(), None  # type: ignore[arg-type]

    def _check_chars(self, num_chars: int) -> None:
        most = MAX_CHARS_PER_TOKEN * self._max_model_len
        if num_chars > most:
            raise RequestError(
                f"the prompt has {num_chars} characters; at most {most} can fit the context of "
                f"{self._max_model_len} tokens",
                code="context_length_exceeded",
                param="prompt",
            )

    def _check_ids(self, prompt: Sequence[int]) -> np.ndarray:
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise FieldError("prompt", f"expected a text or a list of token ids, not {prompt!r:.100}")
        if len(prompt) > self._max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context is {self._max_model_len}",
                code="context_length_exceeded",
                param="prompt",
            )
        try:
            ids = np.asarray(prompt)
        except (OverflowError, TypeError, ValueError):
            raise FieldError("prompt", "expected a list of token ids") from None
        if not ids.size:
            raise FieldError("prompt", "expected at least one token id")
        # NumPy would make integers of floats and texts; it makes objects of integers beyond 64 bits.
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise FieldError("prompt", "expected a list of token ids, which are integers")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise FieldError("prompt", f"token id {bad} is outside 0 to {self._vocab_size - 1}")
        return ids.astype(np.int32)

    def _admission_cost(self, message: tuple[str | None, bytes | None, tuple[ChatTurn, ...] | None]) -> int:
        text, token_ids, turns = message
        if token_ids is not None:
            cost = len(token_ids) // 4
        else:
            num_chars = len(text) if text is not None else sum(map(_num_chars, turns or ()))
            cost = num_chars // CHARS_PER_TOKEN + 1
        if (self._open or self._leaving) and self._queued_tokens + cost > self._limits.max_queued_tokens:
            raise queue_full(
                f"about {self._queued_tokens} prompt tokens are queued, at most {self._limits.max_queued_tokens} are "
                "accepted"
            )
        return cost

    def _cancel(self, request_id: int) -> None:
        if request_id in self._open:
            self._abandon(request_id)

    def _first_timer(self, request_id: int) -> asyncio.TimerHandle:
        loop, limits = asyncio.get_running_loop(), self._limits
        if 0 < limits.first_token_timeout_s < limits.request_timeout_s:
            return loop.call_later(limits.first_token_timeout_s, self._expect_output, request_id)
        return loop.call_later(limits.request_timeout_s, self._expire, request_id)

    def _expect_output(self, request_id: int) -> None:
        """A request that has had none is told to come back, or go elsewhere, while there is time for that."""
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
        """Nobody reads the request any more.  It takes room until the engine says that it has ended there."""
        self._tokenizer.put(Abort(request_id))
        request = self._leaving[request_id] = self._close(request_id)
        return request

    def _end(self, request_id: int) -> _Open:
        """The engine has let go of an open request."""
        request = self._close(request_id)
        self._queued_tokens -= request.estimated_tokens
        return request

    def _close(self, request_id: int) -> _Open:
        """The one place where a request stops being open."""
        request = self._open.pop(request_id)
        request.timer.cancel()
        if not self._open:
            self._idle.set()
        return request

    def _has_left(self, request_id: int) -> bool:
        """The engine has let go of a cancelled request; False if it is not one of those."""
        request = self._leaving.pop(request_id, None)
        if request is None:
            return False
        self._queued_tokens -= request.estimated_tokens
        return True

    # ---- the engine side: messages ----------------------------------------------------------

    def handle(self, message: IngressInbox) -> None:
        match message:
            case Deltas():
                self._deliver(message)
            case Failed():
                self._fail(message)
            case Stats():
                self.stats = message
            case EngineReady():
                self._came("executors")
            case TokenizersReady():
                self._came("tokenizers")
            case EngineRecovering():
                self._lost("executors")
            case TokenizersLost():
                self._lost("tokenizers")
            case _:
                assert_never(message)

    def _came(self, part: Part) -> None:
        self._missing.discard(part)
        if not self._missing:
            self.ready = True
            self.recovering = False
            self.became_ready.set()

    def _lost(self, part: Part) -> None:
        self._missing.add(part)
        self.recovering = True  # requests are taken: they wait, as those do that ran

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


def _num_chars(turn: ChatTurn) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in turn.tool_calls)
    return len(turn.content) + len(turn.reasoning) + calls
