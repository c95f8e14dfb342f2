"""POST /v1/completions: its prompts and its formats.

Owns: how prompts may be given, text completion objects, their logprobs.  Does not know: sockets, streams, the engine.
"""

from collections.abc import Sequence
from typing import cast

import msgspec

from engine.errors import RequestError
from engine.messages import Delta, TokenLogprobs
from server.backend import Prompt
from server.endpoint import Head
from server.generation import DEFAULT, Generation, Translator
from server.openai_requests import CompletionBody
from server.openai_responses import Completion, CompletionChoice, CompletionLogprobs, OptionalUsage, UsageBody
from server.output import Cursor, Output, finish_reason, finite, ids, stop_reason


class Completions:
    """The completions endpoint."""

    id_prefix = "cmpl-"
    prompt_field = "prompt"

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: CompletionBody) -> Generation:
        self._translator.check_model(body.model)
        if body.suffix:
            raise RequestError(
                "suffix: not supported; this server does not know how the model fills in the middle",
                code="unsupported_parameter",
                param="suffix",
            )
        echo, prompt_only = bool(body.echo), body.max_tokens == 0
        if prompt_only and not echo:
            raise RequestError("max_tokens=0: only allowed together with echo", param="max_tokens")
        num_wanted = 1 if body.n is None else body.n
        num_choices = self._num_choices(body, num_wanted)
        ranked = num_choices > num_wanted
        generation = self._translator.translate(
            body,
            read_prompts(body.prompt),
            max_tokens=1 if prompt_only else DEFAULT.max_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=0 if ranked and body.logprobs is None else body.logprobs,
            echo=echo,
            num_choices=num_choices,
            counted="n" if body.best_of is None else "best_of",
            prompt_logprobs=body.logprobs if echo else None,
            prompt_only=prompt_only,
        )
        if not ranked:
            return generation
        return msgspec.structs.replace(generation, num_wanted=num_wanted, shows_logprobs=body.logprobs is not None)

    def _num_choices(self, body: CompletionBody, num_wanted: int) -> int:
        if body.best_of is None:
            return num_wanted
        if body.best_of < num_wanted:
            raise RequestError(f"best_of={body.best_of}: must be at least n ({num_wanted})", param="best_of")
        if body.best_of > num_wanted and body.stream:
            raise RequestError("best_of: which is best is known at the end, so it cannot stream", param="best_of")
        return body.best_of

    def answer(self, head: Head, generation: Generation, outputs: Sequence[Output], usage: UsageBody) -> msgspec.Struct:
        choices = [
            CompletionChoice(
                index=index,
                text=delta.text,
                logprobs=_logprobs(delta.logprobs, 0, delta.prompt_logprobs) if generation.shows_logprobs else None,
                finish_reason=finish_reason(delta),
                stop_reason=stop_reason(delta),
                token_ids=ids(delta.token_ids, generation.shows_token_ids),
                prompt_token_ids=ids(delta.prompt_token_ids, generation.shows_token_ids),
            )
            for index, delta in enumerate(output.delta for output in _best(outputs, generation))
        ]
        return _completion(head, choices, usage)

    def chunks(self, head: Head, cursor: Cursor, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        choice = CompletionChoice(
            index=cursor.index,
            text=delta.text,
            logprobs=_logprobs(delta.logprobs, cursor.num_chars, delta.prompt_logprobs),
            finish_reason=finish_reason(delta),
            stop_reason=stop_reason(delta),
            token_ids=ids(delta.token_ids, cursor.shows_token_ids),
            prompt_token_ids=ids(delta.prompt_token_ids, bool(delta.prompt_token_ids)),
        )
        cursor.num_chars += sum(map(_num_chars, (*delta.prompt_logprobs, *delta.logprobs)))
        return [_completion(head, [choice], usage)]

    def usage_chunk(self, head: Head, usage: UsageBody) -> msgspec.Struct:
        return _completion(head, [], usage)


def read_prompts(prompt: str | list[str | int | list[int]], field: str = "prompt") -> tuple[Prompt, ...]:
    """The four forms of a prompt as one.  Raises RequestError for an empty or mixed list."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (cast("list[int]", prompt),)
    if len(kinds) == 1:
        return tuple(cast("list[str | list[int]]", prompt))
    raise RequestError(
        f"{field}: {'an empty list' if not kinds else 'a mixed list'}; expected a string, token ids, "
        "or a list of either",
        param=field,
    )


def _completion(head: Head, choices: list[CompletionChoice], usage: OptionalUsage) -> Completion:
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def _best(outputs: Sequence[Output], generation: Generation) -> list[Output]:
    """Of every prompt's outputs those that were wanted: the likeliest per token first."""
    if generation.num_wanted is None:
        return list(outputs)
    best: list[Output] = []
    for start in range(0, len(outputs), generation.num_choices):
        candidates = outputs[start : start + generation.num_choices]
        ranked = sorted(candidates, key=lambda output: -output.mean_logprob)
        best += ranked[: generation.num_wanted]
    return best


def _logprobs(
    entries: Sequence[TokenLogprobs], offset: int, prompt: Sequence[TokenLogprobs] = ()
) -> CompletionLogprobs | None:
    """prompt: of an echoed prompt, in front of the others."""
    every = (*prompt, *entries)
    if not every:
        return None
    offsets: list[int] = []
    for entry in every:
        offsets.append(offset)
        offset += _num_chars(entry)
    logprobs: list[float | None] = [finite(entry.sampled.logprob) for entry in every]
    top: list[dict[str, float] | None] = [_likeliest(entry) for entry in every]
    if prompt:
        logprobs[0] = top[0] = None  # nothing comes before it
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=logprobs,
        tokens=[entry.sampled.text for entry in every],
        top_logprobs=top,
    )


def _num_chars(entry: TokenLogprobs) -> int:
    """Characters that begin with this token.  A token may be a part of one, and be shown as something else entirely."""
    return sum(byte & 0xC0 != 0x80 for byte in entry.sampled.utf8)


def _likeliest(entry: TokenLogprobs) -> dict[str, float]:
    """Different tokens can look the same as text; the first and likeliest one keeps the place."""
    likeliest: dict[str, float] = {}
    for token in (*entry.top, entry.sampled):
        likeliest.setdefault(token.text, finite(token.logprob))
    return likeliest
