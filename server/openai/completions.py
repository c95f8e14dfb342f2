"""POST /v1/completions: its prompts and its formats.

Owns: how prompts may be given, text completion objects, their logprobs.  Does not know: sockets, streams, the engine.
"""

from collections.abc import Sequence
from typing import cast

import msgspec

from engine.messages import Delta
from engine.types.errors import FieldError, RequestError
from engine.types.logprobs import TokenLogprobs
from engine.types.prompt import Prompt
from server.generate.endpoint import Endpoint
from server.generate.generation import Generation
from server.generate.output import (
    OptionalUsage,
    Output,
    UsageBody,
    UsageCounter,
    finish_reason,
    finite,
    ids,
    matched_stop,
    stop_reason,
    weight_versions,
)
from server.http.operation import generating
from server.openai.answers import CompletionChoice, CompletionLogprobs, TextCompletion
from server.openai.requests import CompletionBody
from server.openai.translator import DEFAULT, Translator
from server.openai.writer import ChoicesWriter, StreamState


class CompletionsEndpoint(Endpoint[CompletionBody]):
    """POST /v1/completions."""

    operation = generating(
        "/v1/completions",
        "Continue prompts.",
        answer=TextCompletion,
        body=CompletionBody,
        event=TextCompletion,
        in_batches=True,
        span="text_completion",
    )
    body_type = CompletionBody

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: CompletionBody) -> Generation:
        self._translator.check_model(body.model)
        if body.suffix:
            raise FieldError(
                "suffix",
                "not supported; this server does not know how the model fills in the middle",
                code="unsupported_parameter",
            )
        echo, prompt_only = bool(body.echo), body.max_tokens == 0
        if prompt_only and not echo:
            raise RequestError("max_tokens=0: only allowed together with echo", param="max_tokens")
        num_wanted = _num_wanted(body)
        num_choices = _num_choices(body, num_wanted)
        asks_logprobs = body.logprobs is not None or bool(body.logprob_token_ids)
        return self._translator.translate(
            body,
            read_prompts(body.prompt),
            max_tokens=1 if prompt_only else DEFAULT.max_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=0 if num_choices > num_wanted and not asks_logprobs else body.logprobs,
            echo=echo,
            num_choices=num_choices,
            counted="n" if body.best_of is None else "best_of",
            prompt_logprobs=body.logprobs if echo else None,
            prompt_only=prompt_only,
        )

    def writer(self, body: CompletionBody, generation: Generation, usage: UsageCounter) -> "CompletionWriter":
        return CompletionWriter(body, generation, usage, body.model, self._translator.fingerprint)


class CompletionWriter(ChoicesWriter):
    """Writes a text completion, or its chunks."""

    id_prefix = "cmpl-"

    def __init__(
        self, body: CompletionBody, generation: Generation, usage: UsageCounter, model: str, fingerprint: str
    ) -> None:
        super().__init__(body, generation, usage, model, fingerprint)
        self._num_wanted = _num_wanted(body)
        self._shows_logprobs = body.logprobs is not None

    def whole(self, outputs: Sequence[Output]) -> TextCompletion:
        choices = [
            CompletionChoice(
                index=index,
                text=delta.text,
                logprobs=_logprobs(delta.logprobs, 0, delta.prompt_logprobs) if self._shows_logprobs else None,
                finish_reason=finish_reason(delta),
                stop_reason=stop_reason(delta),
                matched_stop=matched_stop(delta),
                token_ids=ids(delta.token_ids, self.shows_token_ids),
                prompt_token_ids=ids(delta.prompt_token_ids, self.shows_token_ids),
                weight_versions=weight_versions(delta),
            )
            for index, delta in enumerate(output.delta for output in self._best(outputs))
        ]
        return self._completion(choices, self.usage.total())

    def chunks(self, state: StreamState, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        choice = CompletionChoice(
            index=state.index,
            text=delta.text,
            logprobs=_logprobs(delta.logprobs, state.num_chars, delta.prompt_logprobs),
            finish_reason=finish_reason(delta),
            stop_reason=stop_reason(delta),
            matched_stop=matched_stop(delta),
            token_ids=ids(delta.token_ids, self.shows_token_ids),
            prompt_token_ids=ids(delta.prompt_token_ids, bool(delta.prompt_token_ids)),
            weight_versions=weight_versions(delta),
        )
        state.num_chars += sum(map(_num_chars, (*delta.prompt_logprobs, *delta.logprobs)))
        return [self._completion([choice], usage)]

    def usage_chunk(self, usage: UsageBody) -> TextCompletion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: OptionalUsage) -> TextCompletion:
        return TextCompletion(**self.head, choices=choices, usage=usage)

    def _best(self, outputs: Sequence[Output]) -> list[Output]:
        """Returns as many of each prompt's outputs as were wanted: the likeliest per token, where there are more."""
        num_choices = self.generation.num_choices
        if num_choices == self._num_wanted:
            return list(outputs)
        best: list[Output] = []
        for start in range(0, len(outputs), num_choices):
            candidates = outputs[start : start + num_choices]
            ranked = sorted(candidates, key=lambda output: -output.mean_logprob)
            best += ranked[: self._num_wanted]
        return best


def _num_wanted(body: CompletionBody) -> int:
    return 1 if body.n is None else body.n


def _num_choices(body: CompletionBody, num_wanted: int) -> int:
    if body.best_of is None:
        return num_wanted
    if body.best_of < num_wanted:
        raise RequestError(f"best_of={body.best_of}: must be at least n ({num_wanted})", param="best_of")
    if body.best_of > num_wanted and body.stream:
        raise FieldError("best_of", "which is best is known at the end, so it cannot stream")
    return body.best_of


def read_prompts(prompt: str | Sequence[str | int | list[int]], field: str = "prompt") -> tuple[Prompt, ...]:
    """Returns the four forms of a prompt as one.  Raises RequestError for an empty or mixed list."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (cast("list[int]", prompt),)
    if len(kinds) == 1:
        return tuple(cast("list[str | list[int]]", prompt))
    raise FieldError(
        field, f"{'a mixed list' if kinds else 'an empty list'}; expected a string, token ids, or a list of either"
    )


def _logprobs(
    entries: Sequence[TokenLogprobs], offset: int, prompt: Sequence[TokenLogprobs] = ()
) -> CompletionLogprobs | None:
    """Returns the log probabilities of tokens, behind those of an echoed prompt."""
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
        text_offset=offsets, token_logprobs=logprobs, tokens=[entry.sampled.text for entry in every], top_logprobs=top
    )


def _num_chars(entry: TokenLogprobs) -> int:
    """Returns how many characters begin with this token, which may be a part of one, and be shown as something else."""
    return sum(byte & 0xC0 != 0x80 for byte in entry.sampled.utf8)


def _likeliest(entry: TokenLogprobs) -> dict[str, float]:
    """Returns the likeliest tokens by text; of those that look the same, the likeliest."""
    likeliest: dict[str, float] = {}
    for token in (*entry.top, entry.sampled):
        likeliest.setdefault(token.text, finite(token.logprob))
    return likeliest
