"""Admission of requests: whether the engine accepts any now, and whether a prompt is valid.

Owns: these refusals, the retry delays, and the estimate of a prompt's tokens.
Does not know: clients, HTTP, which requests are open.
The server checks before it reads a body, and ingress checks again when the request arrives.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from engine.checkpoints.use import ModelUse
from engine.messages import RequestOptions
from engine.settings.sections import LimitsSection
from engine.types.errors import FieldError, RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Prompt

RETRY_AFTER_S = 1  # a queue place can free up with the next step
RETRY_LATER_S = 5  # a model loads, or another server takes over
STATES: Final = {
    "engine_died": "the engine has stopped",
    "draining": "the server is shutting down",
    "not_ready": "the model is loading",
    "asleep": "the engine sleeps until an operator wakes it up",
}
CHARS_PER_TOKEN = 4  # for the admission estimate only; English text and code have three to five
PIXELS_PER_TOKEN = 28 * 28  # of a picture, as most models have it
MAX_PICTURE_TOKENS = 4096  # models shrink larger pictures
MAX_CHARS_PER_TOKEN = 8  # no prompt that fits the context is longer in practice; bounds the tokenizer's work


class Admitting(Protocol):
    """The state of the actor that admits requests: ingress.

    ready: the model is loaded.  loading: returns what a start does right now, or ''.
    asleep: an operator put the engine to sleep.  failure: why the engine died, if it did.
    num_leaving: cancelled requests that the engine has not released yet."""

    ready: bool
    loading: Callable[[], str]
    asleep: bool
    failure: str | None

    @property
    def draining(self) -> bool: ...

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""

    @property
    def num_leaving(self) -> int: ...


class Load(NamedTuple):
    """Requests that were accepted and have not ended.  num_leaving: cancelled ones that the engine has not let go of.

    num_queued_tokens: of all their prompts.  num_of_client: requests of the client that asks."""

    num_open: int = 0
    num_leaving: int = 0
    num_queued_tokens: int = 0
    num_of_client: int = 0

    def refusal(self, limits: LimitsSection, cost: int = 0) -> str:
        """Return the key of [limits] by which a request is not accepted now, or ''.  cost: tokens of its prompt."""
        num_held = self.num_open + self.num_leaving
        if num_held >= limits.max_requests:
            return "max_requests"
        if 0 < limits.max_requests_per_client <= self.num_of_client:
            return "max_requests_per_client"
        return "max_queued_tokens" if num_held and self.num_queued_tokens + cost > limits.max_queued_tokens else ""

    def check(self, limits: LimitsSection, cost: int = 0) -> None:
        """Raise RequestError (429) for a request that is not accepted now."""
        if not (limit := self.refusal(limits, cost)):
            return
        leaving = f", {self.num_leaving} cancelled ones are leaving," if self.num_leaving else ""
        code, seen = {
            "max_requests": ("queue_full", f"{self.num_open} requests are open{leaving}"),
            "max_requests_per_client": ("client_queue_full", f"{self.num_of_client} of your requests are open"),
            "max_queued_tokens": ("queue_full", f"about {self.num_queued_tokens} prompt tokens are queued"),
        }[limit]
        reason = f"{seen} and no more than {getattr(limits, limit)} are accepted; try again later"
        raise RequestError(reason, status=429, code=code, retry_after_s=RETRY_AFTER_S)


def not_serving(code: str, detail: str = "") -> RequestError:
    """Return the refusal of all requests until a state changes.  code: a key of ``STATES``.  detail: follows it."""
    return RequestError(STATES[code] + detail, status=503, code=code, retry_after_s=RETRY_LATER_S)


def unavailable(ingress: Admitting) -> RequestError | None:
    """Return why no request can be accepted until the engine's state changes, or None."""
    if ingress.failure is not None:
        error = not_serving("engine_died")
        error.add_note(ingress.failure)  # for callers in Python; an HTTP response does not contain it
        return error
    states = {"draining": ingress.draining, "not_ready": not ingress.ready, "asleep": ingress.asleep}
    code = next((code for code, holds in states.items() if holds), None)
    if code is None:
        return None
    return not_serving(code, f": {what}" if code == "not_ready" and (what := ingress.loading()) else "")


def check_admission(ingress: Admitting, limits: LimitsSection) -> None:
    """Raise RequestError if no request can be accepted: 503 when not serving, 429 when full."""
    if (error := unavailable(ingress)) is not None:
        raise error
    Load(ingress.num_open, ingress.num_leaving).check(limits)


def read_params(params: SamplingParams, use: ModelUse, vocab_size: int) -> SamplingParams:
    """Return the parameters to sample with.  Raises RequestError if a value is out of range or the task unsupported."""
    params.check(vocab_size)
    return params if params.generates and use.kind == "generate" else use.params(params)


def read_prompt(
    prompt: Prompt, options: RequestOptions, max_model_len: int, vocab_size: int
) -> tuple[str | None, bytes | None, tuple[ChatTurn, ...] | None]:
    """Return (text, token ids, turns), of which exactly one is set.

    Raises RequestError for an invalid prompt, and for a prompt or resumed output that cannot fit the context."""
    if (num_resumed := len(options.resumed) // 4) >= max_model_len:  # before it becomes text
        raise RequestError(
            f"the output to go on from has {num_resumed} tokens, the context is {max_model_len}", code="not_resumable"
        )
    if options.truncate_to or options.keep_last:
        _check_uncut(prompt)
    if options.truncate_to:
        prompt = _shortened(prompt, options.truncate_to, max_model_len)
    if isinstance(prompt, str):
        if options.keep_last:
            prompt = prompt[-MAX_CHARS_PER_TOKEN * max_model_len :]
        check_chars(len(prompt), max_model_len)
        return str.__str__(prompt), None, None  # a plain str, not a subclass such as NumPy's
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn):
        turns: tuple[ChatTurn, ...] = prompt
        if not options.truncate_to:  # else the text was cut to what can fit, without what the turns cost
            check_chars(num_chars(turns) + len(options.chat.tools), max_model_len)
        return None, None, turns
    return None, _token_ids(prompt, max_model_len, vocab_size).tobytes(), None  # type: ignore[arg-type]


def prompt_cost(text: str | None, token_ids: bytes | None, turns: Iterable[ChatTurn] | None, tools: str = "") -> int:
    """Return the number of tokens of a prompt, estimated if it is not token ids.  tools: as in ``ChatOptions``."""
    if token_ids is not None:
        return len(token_ids) // 4
    if text is not None:
        return len(text) // CHARS_PER_TOKEN + 1
    turns = tuple(turns or ())
    pictures = (picture for turn in turns for picture in turn.pictures)
    num_of_pictures = sum(min(one.num_pixels // PIXELS_PER_TOKEN + 1, MAX_PICTURE_TOKENS) for one in pictures)
    return num_of_pictures + (num_chars(turns) + len(tools)) // CHARS_PER_TOKEN + 1


def num_chars(turns: Iterable[ChatTurn]) -> int:
    """Return the number of characters of a conversation, plus those of one token for each turn and call."""
    return sum(
        CHARS_PER_TOKEN
        + len(turn.content)
        + len(turn.reasoning)
        + sum(CHARS_PER_TOKEN + len(call.name) + len(call.arguments) for call in turn.tool_calls)
        for turn in turns
    )


def check_chars(count: int, max_model_len: int, param: str = "prompt") -> None:
    """Raise RequestError if a text is too long for the context however it is tokenized."""
    most = MAX_CHARS_PER_TOKEN * max_model_len
    if count > most:
        raise RequestError(
            f"the prompt has {count} characters; at most {most} can fit the context of {max_model_len} tokens",
            code="context_length_exceeded",
            param=param,
        )


def _check_uncut(prompt: Prompt) -> None:
    """Raise RequestError for a conversation with pictures, whose places would not be those of the whole prompt."""
    if isinstance(prompt, tuple) and any(isinstance(turn, ChatTurn) and turn.pictures for turn in prompt):
        raise RequestError(
            "truncate_prompt_tokens: a conversation with pictures is not cut; leave it out",
            param="truncate_prompt_tokens",
        )


def _shortened(prompt: Prompt, truncate_to: int, max_model_len: int) -> Prompt:
    """Return the prompt cut to the most characters that can matter; the tokenizer then cuts it to its exact size."""
    most = MAX_CHARS_PER_TOKEN * max_model_len
    if isinstance(prompt, str):
        return prompt[:most]
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn):
        *turns, last = prompt
        room = max(0, most - num_chars(turns))
        return (*turns, msgspec.structs.replace(last, content=last.content[:room]))
    return prompt[:truncate_to]


def _token_ids(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> np.ndarray:
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise FieldError("prompt", f"expected a text or a list of token ids, not {prompt!r:.100}")
    if len(prompt) > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the context is {max_model_len}",
            code="context_length_exceeded",
            param="prompt",
        )
    try:
        ids = np.asarray(prompt)
    except (OverflowError, TypeError, ValueError):
        raise FieldError("prompt", "expected a list of token ids") from None
    if not ids.size:
        raise FieldError("prompt", "expected at least one token id")
    # NumPy would convert floats and texts to integers; integers beyond 64 bits become objects.
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise FieldError("prompt", "expected a list of token ids, which are integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        raise FieldError("prompt", f"token id {bad} is outside 0 to {vocab_size - 1}")
    return ids.astype(np.int32)
