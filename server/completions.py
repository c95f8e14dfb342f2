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
from server.output import Cursor, Output, finish_reason, finite, stop_reason


class Completions:
    """The completions endpoint."""

    id_prefix = "cmpl-"
    prompt_field = "prompt"

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: CompletionBody) -> Generation:
        self._translator.check_model(body.model)
        if body.echo and body.logprobs is not None:
            raise RequestError("echo: not supported together with logprobs", code="unsupported_parameter", param="echo")
        return self._translator.translate(
            body,
            read_prompts(body.prompt),
            max_tokens=DEFAULT.max_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            echo=bool(body.echo),
        )

    def answer(self, head: Head, outputs: Sequence[Output], usage: UsageBody) -> msgspec.Struct:
        choices = [
            CompletionChoice(
                index=output.index,
                text=output.text,
                logprobs=_logprobs(output.logprobs, 0),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in outputs
        ]
        return _completion(head, choices, usage)

    def chunks(self, head: Head, cursor: Cursor, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        choice = CompletionChoice(
            index=cursor.index,
            text=delta.text,
            logprobs=_logprobs(delta.logprobs, cursor.num_chars),
            finish_reason=finish_reason(delta),
            stop_reason=stop_reason(delta),
        )
        cursor.num_chars += sum(len(entry.sampled.text) for entry in delta.logprobs)
        return [_completion(head, [choice], usage)]

    def usage_chunk(self, head: Head, usage: UsageBody) -> msgspec.Struct:
        return _completion(head, [], usage)


def read_prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """The four forms of a prompt as one.  Raises RequestError for an empty or mixed list."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (cast("list[int]", prompt),)
    if len(kinds) == 1:
        return tuple(cast("list[str | list[int]]", prompt))
    raise RequestError(
        f"prompt: {'an empty list' if not kinds else 'a mixed list'}; expected a string, token ids, "
        "or a list of either",
        param="prompt",
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


def _logprobs(entries: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs | None:
    if not entries:
        return None
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.sampled.text)
        likeliest: dict[str, float] = {}
        # Different tokens can look the same as text; the first and likeliest one keeps the place.
        for token in (*entry.top, entry.sampled):
            likeliest.setdefault(token.text, finite(token.logprob))
        top.append(likeliest)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[finite(entry.sampled.logprob) for entry in entries],
        tokens=[entry.sampled.text for entry in entries],
        top_logprobs=top,
    )
