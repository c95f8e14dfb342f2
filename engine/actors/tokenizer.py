"""The tokenizer actor: it encodes prompts and decodes output.

consumes: Tokenize, Abort (ingress) · Tokens, Failed (scheduler) · Stop (system)
produces: Admit, Abort (scheduler) · Deltas, Failed (ingress)
waits for: a message; encoding runs in a worker thread and returns as one.   owns: the text of every request.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
from msgspec import structs

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import TokenizerInbox
from engine.actors.stream import merged
from engine.messages import Abort, Admit, Delta, Deltas, Failed, Finish, StepExtras, Tokenize, Tokens, Usage
from engine.text.codec import TextCodec, TextStream
from engine.text.forms import OutputForms
from engine.text.logprobs import PromptLogprobTexts, logprob_texts
from engine.text.reasoning import Thinking
from engine.text.resumed import resumed_delta
from engine.types.errors import RequestError
from engine.types.logprobs import TokenLogprobs
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.int32]
NO_EXTRAS = StepExtras()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An encoded prompt, from a worker thread.  It stays inside this actor, so it needs no wire format.

    params: the request's, as they are checked; check_s: seconds that this took."""

    request: Tokenize
    token_ids: TokenIds | None
    params: SamplingParams
    thinking: Thinking = "none"
    check_s: float = 0.0
    error: RequestError | None = None


@dataclass(slots=True)
class _Text:
    """One request's text state.  request: without its prompt.  encoding: the task that has it, None once that is done.
    stream: None until then.  opening: the first delta's part about the prompt, until that delta is sent."""

    request: Tokenize
    encoding: asyncio.Task[Any] | None = None
    num_prompt: int = 0
    num_completion: int = 0
    cached_tokens: tuple[int, int] = (0, 0)
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    stream: TextStream | None = None
    prompt_logprobs: PromptLogprobTexts | None = None
    opening: Delta | None = None

    def opened(self, delta: Delta) -> Delta:
        """Return the delta, merged with the prompt's part if it is the first; later text then matches its tokens."""
        opening, self.opening = self.opening, None
        return delta if opening is None else merged((opening, delta))

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's logprobs once, with the first token: all parts have arrived by then."""
        texts, self.prompt_logprobs = self.prompt_logprobs, None
        return texts.entries() if texts is not None else ()


class Tokenizer(Actor[TokenizerInbox | _Encoded]):
    """Encodes and decodes text.  codec: the model's tokenizer and chat template.  vocab_size: the model's, which may be
    smaller than the tokenizer's.  forms: of output, that requests may demand."""

    def __init__(self, *, capacity: int, codec: TextCodec, vocab_size: int, forms: OutputForms | None = None) -> None:
        super().__init__("tokenizer", capacity)
        self._codec = codec
        self._vocab_size = vocab_size
        self._forms = forms or OutputForms()
        self._texts: dict[int, _Text] = {}
        self._out: list[Delta] = []

    def connect(self, *, scheduler: Link[Admit | Abort], ingress: Link[Deltas | Failed]) -> None:
        """Set the receivers of results; they need this actor's link, so they are built later."""
        self._scheduler = scheduler
        self._ingress = ingress

    def handle(self, message: TokenizerInbox | _Encoded) -> None:
        match message:
            case Tokens():
                self._take_tokens(message)
            case Tokenize():
                bare = structs.replace(message, text=None, token_ids=None, turns=None)
                self._texts[message.request_id] = _Text(bare, self.spawn(self._encode(message)))
            case _Encoded():
                self._admit(message)
            case Abort():
                self._abort(message)
            case Failed():
                self._fail(message)
            case _:
                assert_never(message)

    def flush(self) -> None:
        if self._out:
            self._ingress.put(Deltas(deltas=tuple(self._out)))
            self._out.clear()

    # ---- input ----------------------------------------------------------------------

    async def _encode(self, request: Tokenize) -> _Encoded:
        try:
            token_ids, params, options = request.token_ids, request.params, request.options
            if token_ids is not None and not params.has_form and not params.bad_words:
                return _Encoded(request, self._codec.trimmed(token_ids, options.truncate_to), params)
            return await asyncio.to_thread(self._understand, request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a tokenizer (a panic too), a template, a plugin: only this request fails
            return _Encoded(request, None, request.params, error=_fault(request.request_id, error))

    def _understand(self, request: Tokenize) -> _Encoded:
        """Encode the prompt and check the form of the output, in a worker thread."""
        thinking: Thinking = "none"
        check_s = 0.0
        if request.token_ids is not None:
            token_ids = self._codec.trimmed(request.token_ids, request.options.truncate_to)
        elif request.turns is not None:
            chat = self._codec.encode_chat(request.turns, request.options.chat, request.options.truncate_to)
            token_ids, thinking, request = chat.token_ids, chat.thinking, chat.with_parts(request)
        else:
            assert request.text is not None, f"request {request.request_id} has no prompt of any kind"
            token_ids = self._codec.encode(request.text, truncate_to=request.options.truncate_to)
        self._codec.check_known(token_ids, self._vocab_size, "messages" if request.turns is not None else "prompt")
        token_ids = token_ids[-request.options.keep_last :]  # 0 keeps all of them, as -0 is 0
        params = self._codec.spelt(request.params)
        if params.has_form:
            params, check_s = self._forms.checked(params, self._codec.formats.beginning_of_form(thinking))
        shown = thinking if request.options.chat.split_reasoning else "none"
        return _Encoded(request, token_ids, params, shown, check_s)

    def _admit(self, encoded: _Encoded) -> None:
        request = encoded.request
        if (text := self._texts.get(request.request_id)) is None:
            return  # cancelled while it was encoded
        if encoded.token_ids is None:
            assert encoded.error is not None, "encoding gave neither tokens nor an error"
            self._fail(Failed.of(request.request_id, encoded.error))
            return
        text.encoding, text.num_prompt = None, len(encoded.token_ids)
        params, chat, options = encoded.params, request.turns is not None, request.options
        num_resumed = len(options.resumed) // 4  # int32
        try:
            text.stream = self._codec.open_stream(encoded.token_ids, params, chat=chat, thinking=encoded.thinking)
            if params.prompt_logprobs is not None:
                text.prompt_logprobs = PromptLogprobTexts(self._codec, encoded.token_ids)
            if options.echo or options.return_prompt_ids:
                prompt = request.text
                if prompt is None or options.keep_last:
                    prompt = self._codec.decode(encoded.token_ids)
                ids = encoded.token_ids.tobytes() if options.return_prompt_ids else b""
                text.opening = Delta(
                    request_id=request.request_id, text=prompt if options.echo else "", prompt_token_ids=ids
                )
            if num_resumed:
                text.num_completion = num_resumed
                old = resumed_delta(request, self._codec, self._vocab_size, text.stream, self._usage(text))
                self._out.append(text.opened(old))
        except BaseException as error:  # of the tokenizer: only this request fails
            self._fail(Failed.of(request.request_id, _fault(request.request_id, error)))
            return
        self._scheduler.put(
            Admit(
                request_id=request.request_id,
                token_ids=encoded.token_ids.tobytes() + options.resumed,
                params=params,
                priority=options.priority,
                cache_salt=options.cache_salt,
                num_resumed=num_resumed,
                origin=options.origin,
                parts=options.parts,
                check_s=encoded.check_s,
            )
        )

    def _abort(self, message: Abort) -> None:
        if (text := self._texts.pop(message.request_id, None)) is None:
            return  # it has ended, and ingress knows
        if text.stream is not None:
            self._scheduler.put(message)
        elif text.encoding is not None:
            text.encoding.cancel()  # a prompt that waits for a thread must not delay others
        self._out.append(text.opened(Delta(request_id=message.request_id, text="", finish=Finish.ABORT)))

    def _fail(self, message: Failed) -> None:
        if self._texts.pop(message.request_id, None) is not None:
            self.flush()  # output from before the failure is sent first
            self._ingress.put(message)

    # ---- output ---------------------------------------------------------------------

    def _take_tokens(self, message: Tokens) -> None:
        request_ids = np.frombuffer(message.request_ids, dtype=np.int64).tolist()
        token_ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        for request_id in message.cached_tokens.keys() & self._texts.keys():
            self._texts[request_id].cached_tokens = message.cached_tokens[request_id]
        for request_id, extras in message.extras.items():
            if (text := self._texts.get(request_id)) is None:
                continue
            if extras.prompt_logprobs is not None and text.prompt_logprobs is not None:
                text.prompt_logprobs.take(extras.prompt_logprobs)
            text.accepted_tokens += extras.num_accepted
            text.rejected_tokens += extras.num_rejected
        for request_id, token_id, finish in zip(request_ids, token_ids, message.finishes, strict=True):
            if (text := self._texts.get(request_id)) is not None:  # else it has ended here already
                extras = message.extras.get(request_id, NO_EXTRAS)
                try:
                    self._take_token(text, token_id, Finish(finish), extras)
                except BaseException as error:  # of the tokenizer: only this request fails
                    self._texts[request_id] = text
                    self._scheduler.put(Abort(request_id=request_id))
                    self._fail(Failed.of(request_id, _fault(request_id, error)))

    def _take_token(self, text: _Text, token_id: int, finish: Finish, extras: StepExtras) -> None:
        stream, request = text.stream, text.request
        if request.options.prompt_only:
            if finish == Finish.RUNNING:
                return
            token_id, finish = -1, finish if finish == Finish.ABORT else Finish.LENGTH
        assert stream is not None, f"request {request.request_id} got a token before it was admitted"
        stop_reason: str | int | None = None
        shown = ""
        logprobs = extras.logprobs if token_id >= 0 else None
        if token_id >= 0:
            text.num_completion += 1
            if finish == Finish.STOP and not request.params.include_stop_str_in_output:
                # The token that ends a text is not part of it.
                stop_reason = token_id if token_id in request.params.stop_token_ids else None
            else:
                shown = stream.push([token_id])
        if stream.matched is None and finish != Finish.RUNNING:
            shown += stream.finish()
        if stream.matched is not None:
            stop_reason = stream.matched
            if finish == Finish.RUNNING:
                self._scheduler.put(Abort(request_id=request.request_id, finish=Finish.STOP))
            finish = Finish.STOP
        if finish != Finish.RUNNING:
            del self._texts[request.request_id]
        delta = Delta(
            request_id=request.request_id,
            text=shown,
            token_ids=token_id.to_bytes(4, "little", signed=True) if token_id >= 0 else b"",
            finish=finish,
            stop_reason=stop_reason,
            # The first delta carries the prompt's length, the last one all usage.
            usage=self._usage(text) if finish != Finish.RUNNING or text.num_completion == 1 else None,
            logprobs=(logprob_texts(self._codec, token_id, logprobs),) if logprobs is not None else (),
            reasoning=stream.take_thoughts(),
            prompt_logprobs=text.take_prompt_logprobs(),
            result=extras.result,
        )
        self._out.append(delta if text.opening is None else text.opened(delta))

    def _usage(self, text: _Text) -> Usage:
        return Usage(
            prompt_tokens=text.num_prompt,
            completion_tokens=text.num_completion,
            cached_tokens=text.cached_tokens[0],
            created_tokens=text.cached_tokens[1],
            reasoning_tokens=text.stream.num_reasoning_tokens if text.stream is not None else 0,
            accepted_tokens=text.accepted_tokens,
            rejected_tokens=text.rejected_tokens,
        )


def _fault(request_id: int, error: BaseException) -> RequestError:
    """Return the error for a client whose text broke the code that handles it; other errors are logged in full."""
    if isinstance(error, RequestError):
        return error
    log.error("request=%d failed in the tokenizer", request_id, exc_info=error)
    return RequestError("internal error; the server log has the details", status=500, code="internal_error")
