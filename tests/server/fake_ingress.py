"""An engine front door without an engine: text is a pure function of prompt, seed and sampling parameters.

Streams are the real ones, fed by a task per request.  A prompt that begins with "!" asks for trouble:
!refuse (fails before any output), !timeout (fails as requests do that take too long), !fail and !die (fail after
three tokens), !bug (an unexpected exception in open), !late-bug (one in the stream), !flood (a kilobyte of text per
token), !hang (no output until cancelled).  !think begins with thoughts, !call answers with a call (as a user message).
"""

import asyncio
import itertools
import zlib
from collections.abc import Callable

import msgspec
import numpy as np

from engine.actors.operations import SettingsChanged
from engine.actors.stream import Stream, merged
from engine.messages import DEFAULT_OPTIONS, Delta, Finish, RequestOptions, Usage
from engine.types.errors import CallboardError, EngineDied, RequestError
from engine.types.logprobs import TokenLogprobs, TokenText
from engine.types.notices import Stats
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Prompt

# Everything that a careless framing or decoding would trip over.
WORDS = (
    "alpha ",
    "be\nta ",
    "\r\n\r\n",
    "data: [DONE]\n\n",
    'qu"ote\\ ',
    "δέλτα ",
    "🎭",
    "",
    "\u2028",
    "\x00\x1f",
    "omega ",
)
CALL = 'Sure.\n<tool_call>\n{"name": "look", "arguments": {"at": "δ", "n": [1, 2]}}\n</tool_call>'
EOS_AFTER = 12


class FakeIngress:
    """See the module.  ``delay_s`` is the time between two tokens; ``opened`` has every stream ever opened."""

    def __init__(
        self, *, delay_s: float = 0.0, max_requests: int = 512, max_model_len: int = 1024, vocab_size: int = 1000
    ) -> None:
        self.delay_s = delay_s
        self.ready = True
        self.loading = str  # returns ''
        self.draining = False
        self.recovering = self.asleep = False
        self.settings_watchers: list[Callable[[SettingsChanged], None]] = []
        self.stalled_s = 0.0  # what the fake monitor says
        self.failure: str | None = None
        self.stats: Stats | None = Stats(step_id=7, running=1, waiting=2, pages_free=50, pages_cached=30, pages_used=20)
        self.num_leaving = 0
        self.opened: list[Stream] = []
        self.asked: list[tuple[Prompt, SamplingParams, RequestOptions]] = []
        self._max_requests = max_requests
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[Stream, asyncio.Task[None]]] = {}

    def drain(self) -> None:
        self.draining = True

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> Stream:
        if self.num_open >= self._max_requests:
            raise RequestError("full", status=429, code="queue_full", retry_after_s=1)
        params.check(self._vocab_size)
        text = as_text(prompt)
        if text.startswith("!bug"):
            raise RuntimeError("open failed in /secret/path.py")
        if len(text) > 8 * self._max_model_len:
            raise RequestError(
                f"the prompt has {len(text)} characters, {8 * self._max_model_len} can fit",
                code="context_length_exceeded",
                param="prompt",
            )
        if not isinstance(prompt, str | tuple) and (not prompt or max(prompt) >= self._vocab_size):
            raise RequestError("prompt: token id out of range", param="prompt")
        request_id = next(self._ids)
        stream = Stream(request_id, self._cancel, len(text) // 4 + 1)
        self.opened.append(stream)
        self.asked.append((prompt, params, options))
        task = asyncio.get_running_loop().create_task(self._produce(stream, text, params, options))
        self._open[request_id] = stream, task
        return stream

    async def wait_idle(self, timeout_s: float) -> bool:
        tasks = [task for _, task in self._open.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return not self._open

    def abort(self, request_id: int) -> bool:
        if request_id not in self._open:
            return False
        stream, task = self._open.pop(request_id)
        task.cancel()
        stream.push(Delta(request_id=request_id, text="", finish=Finish.ABORT))
        return True

    def abort_all(self) -> None:
        for request_id in list(self._open):
            self._fail(request_id, RequestError("the server is shutting down", status=503, code="shutting_down"))

    def fail_all(self, error: EngineDied) -> None:
        self.failure = str(error)
        for request_id in list(self._open):
            self._fail(request_id, error)

    def _cancel(self, request_id: int) -> None:
        if request_id in self._open:
            self._open.pop(request_id)[1].cancel()

    def _fail(self, request_id: int, error: CallboardError) -> None:
        stream, task = self._open.pop(request_id)
        task.cancel()
        stream.fail(error)

    async def _produce(self, stream: Stream, text: str, params: SamplingParams, options: RequestOptions) -> None:
        request_id = stream.request_id
        if text.startswith("!refuse"):
            await asyncio.sleep(0)
            self._fail(request_id, RequestError("too long by 7 tokens", code="context_length_exceeded", param="prompt"))
        if text.startswith("!timeout"):
            await asyncio.sleep(0)
            self._fail(request_id, RequestError("longer than 600 s", status=504, code="request_timeout"))
        if text.startswith("!hang"):
            await asyncio.Event().wait()
        every, known = deltas(request_id, text, params, options.echo), len(options.resumed) // 4
        if known:
            assert b"".join(delta.token_ids for delta in every[:known]) == options.resumed
            every[:known] = [msgspec.structs.replace(merged(every[:known]), resumed=True)]
        for index, delta in enumerate(every):
            await asyncio.sleep(self.delay_s)
            if index == 3 and text.startswith("!fail"):
                self._fail(request_id, RequestError("not finite", status=500, code="numerical_error"))
            if index == 3 and text.startswith("!die"):
                self._fail(request_id, EngineDied("executor crashed in /secret/path.py"))
            if index == 3 and text.startswith("!late-bug"):
                self._fail(request_id, ZeroDivisionError("in /secret/path.py"))  # type: ignore[arg-type]
            if delta.finish != Finish.RUNNING:
                self._open.pop(request_id, None)
            stream.push(delta)


def as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], ChatTurn):
        return "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)
    return " ".join(map(str, prompt))


def deltas(request_id: int, text: str, params: SamplingParams, echo: bool) -> list[Delta]:
    """The whole output of a request, one delta per token."""
    token_ids, finish = _token_ids(text, params)
    words = [WORDS[token_id % len(WORDS)] for token_id in token_ids]
    if text.startswith("!flood"):
        words = ["x" * 1024 for _ in words]
    stop_reason: str | None = None
    for stop in params.stop:
        whole = "".join(words)
        if (found := whole.find(stop)) >= 0:
            words, token_ids = _cut(words, token_ids, found)
            finish, stop_reason = Finish.STOP, stop
    if "!call" in text:
        words = [CALL[at : at + 7] for at in range(0, len(CALL), 7)]
        token_ids, finish = list(range(len(words))), Finish.STOP
    num_thoughts = 3 if "!think" in text else 0
    if echo:
        words[0] = text + words[0]
    usage = Usage(
        prompt_tokens=len(text.split()) + 1,
        completion_tokens=len(token_ids),
        cached_tokens=min(2, len(text.split())),
        reasoning_tokens=num_thoughts,
    )
    made = []
    for index, (token_id, word) in enumerate(zip(token_ids, words, strict=True)):
        last = index == len(token_ids) - 1
        made.append(
            Delta(
                request_id=request_id,
                text="" if index < num_thoughts else word,
                token_ids=np.array([token_id], np.int32).tobytes(),
                finish=finish if last else Finish.RUNNING,
                stop_reason=stop_reason if last else None,
                usage=usage if last else None,
                reasoning=word if index < num_thoughts else "",
                logprobs=() if params.logprobs is None else (_logprobs(token_id, params.logprobs),),
            )
        )
    return made


def _token_ids(text: str, params: SamplingParams) -> tuple[list[int], Finish]:
    state = zlib.crc32(f"{text}|{params.seed}|{params.temperature}".encode())
    num_tokens = 1 << 30 if params.max_tokens is None else params.max_tokens
    finish = Finish.LENGTH
    if not params.ignore_eos and num_tokens > EOS_AFTER:
        num_tokens, finish = EOS_AFTER, Finish.STOP
    token_ids = []
    for _ in range(num_tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        token_ids.append(state % 997)
    return token_ids, finish


def _cut(words: list[str], token_ids: list[int], end: int) -> tuple[list[str], list[int]]:
    """Words up to character ``end``, and the tokens that have any part before or at it."""
    kept: list[str] = []
    for word in words:
        kept.append(word[:end])
        end -= len(word)
        if end < 0:
            break
    return kept, token_ids[: len(kept)]


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    def token(number: int, logprob: float) -> TokenText:
        word = WORDS[number % len(WORDS)]
        return TokenText(token_id=number, text=word, utf8=word.encode(), logprob=logprob)

    top = tuple(token(token_id + rank, float("-inf") if rank == 3 else -0.5 * rank) for rank in range(num_top))
    return TokenLogprobs(sampled=token(token_id, -0.25), top=top)
