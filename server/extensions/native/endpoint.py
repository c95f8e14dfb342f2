"""POST /generate: text or token ids in, text and token ids out, as SGLang has it; for routers and training loops.

Owns: what may be asked, for all prompts or for each, and the formats.  Does not know: how text is made.
An event of a stream is the answer so far, as SGLang's clients read it, or with ``stream_output`` what is new.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from engine.messages import Delta
from engine.types.errors import FieldError
from engine.types.logprobs import TokenLogprobs, TokenText
from engine.types.prompt import Prompt
from server.extensions.native.bodies import (
    Logprob,
    NativeBody,
    NativeFinish,
    NativeInfo,
    NativeOutput,
    NativeParams,
    OnePrompt,
)
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter, finish_reason, finite, matched_stop, unpacked, weight_versions
from server.http.operation import generating
from server.openai.completions import read_prompts
from server.openai.requests import GenerationBody, SamplingFields
from server.openai.translator import Translator

DEFAULT_MAX_NEW_TOKENS = 128
# What other layers call what this endpoint calls differently.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
PER_PROMPT = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "rid")


class Native(Endpoint[NativeBody]):
    """POST /generate."""

    operation = generating(
        "/generate",
        "Continue prompts.",
        answer=NativeOutput | list[NativeOutput],
        body=NativeBody,
        event=NativeOutput,
        span="text_completion",
    )
    body_type = NativeBody
    repeats_logprobs = True
    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(NativeParams.__struct_fields__, "sampling_params"),
        **{theirs: f"sampling_params, as {ours}" for theirs, ours in RENAMED.items()},
        **dict.fromkeys(("response_format", "structured_outputs"), "sampling_params, as json_schema, regex or ebnf"),
    }

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: NativeBody) -> Generation:
        self._translator.check_model(body.model)
        if body.text is not None and body.input_ids is not None:
            raise FieldError("text", "not possible together with input_ids")
        given = body.text if body.text is not None else body.input_ids
        if given is None:
            raise FieldError("text", "required, but not given; or input_ids")
        prompts = read_prompts(given, _prompt_field(body))
        _check_lists(body, len(prompts))
        first, *others = asked = _asked(body)
        generation = self._generation(body, first, prompts)
        if not others:
            return generation
        each = [self._generation(body, one, prompts) for one in asked]
        if {one.num_choices for one in each} != {generation.num_choices}:
            raise FieldError("n", "must be the same for all prompts")
        fields = {one.grammar_field for one in each} - {""}
        return msgspec.structs.replace(
            generation,
            of_prompts=tuple((one.params, one.options) for one in each),
            # Whose grammar is refused is not known, so their common name must do.
            grammar_field=fields.pop() if len(fields) == 1 else "sampling_params" if fields else "",
        )

    def _generation(self, body: NativeBody, asked: OnePrompt, prompts: tuple[Prompt, ...]) -> Generation:
        params = asked.params
        if params.spaces_between_special_tokens is False:
            raise FieldError("spaces_between_special_tokens", "cannot be turned off")
        if asked.named and asked.prompt_start >= 0:
            raise FieldError("token_ids_logprob", "sent for the output alone; leave out logprob_start_len")
        most = _most_tokens(params)
        num_top = asked.num_top if asked.logprobs else None
        shared = GenerationBody(
            model=body.model or self._translator.card.name,
            stream=body.stream,
            min_tokens=params.min_new_tokens,
            seed=params.sampling_seed,
            include_stop_str_in_output=params.no_stop_trim,
            priority=body.priority,
            cache_salt=body.cache_salt,
            request_id=body.request_id,
            logprob_token_ids=asked.named or None,
            **{name: getattr(params, name) for name in SamplingFields.__struct_fields__},
        )
        return self._translator.translate(
            shared,
            prompts,
            max_tokens=max(1, most),
            logprobs=num_top,
            prompt_logprobs=num_top if asked.prompt_start >= 0 else None,
            prompt_only=most == 0,
        )

    def rename(self, field: str, body: NativeBody) -> str:
        if field == "prompt":
            return _prompt_field(body)
        if field == "logprob_token_ids":
            return "token_ids_logprob"
        name = RENAMED.get(field, field)
        return f"sampling_params.{name}" if name in NativeParams.__struct_fields__ else field

    def writer(self, body: NativeBody, generation: Generation, usage: UsageCounter) -> "NativeWriter":
        return NativeWriter(body, generation, usage)


class NativeWriter(Writer):
    """Writes an output, or a list of them."""

    def __init__(self, body: NativeBody, generation: Generation, usage: UsageCounter) -> None:
        self._usage = usage
        self._asked = _asked(body)
        self._num_choices = generation.num_choices
        self._sends_news = bool(body.stream_output)
        self._shows_text = bool(body.return_text_in_logprobs)
        self._outputs: dict[int, Output] = {}
        self._is_single = _is_one(body) and generation.num_choices == 1
        self.id = "" if isinstance(body.rid, list) else body.rid or generation.origin.key.hex
        several = [f"{self.id}_{number}" for number in range(len(generation.prompts))]
        self._names = body.rid if isinstance(body.rid, list) else [self.id] if _is_one(body) else several
        self.parts = {
            name: range(number * self._num_choices, (number + 1) * self._num_choices)
            for number, name in enumerate(self._names)
        }

    def whole(self, outputs: Sequence[Output]) -> NativeOutput | list[NativeOutput]:
        told = [self._body_of(output) for output in outputs]
        return told[0] if self._is_single else told

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        output = Output(index) if self._sends_news else self._outputs.setdefault(index, Output(index))
        output.add(delta)
        return [self._body_of(output)] if delta.token_ids or delta.finish else []

    def _body_of(self, output: Output) -> NativeOutput:
        """Returns an output, or what there is of it, in this format."""
        return NativeOutput(
            text=output.delta.text,
            output_ids=unpacked(output.delta.token_ids),
            index=UNSET if self._is_single else output.index,
            meta_info=self._info(output),
        )

    def _info(self, output: Output) -> NativeInfo:
        number = output.index // self._num_choices
        asked = self._asked[number % len(self._asked)]  # there is one for all, or one for each
        counts = self._usage.of_choice(output.index)
        prompt = output.delta.prompt_logprobs[asked.prompt_start :] if output.delta.prompt_logprobs else ()
        values, top = self._logprobs(prompt), self._top_logprobs(prompt)
        if prompt and asked.prompt_start == 0:
            # Nothing comes before a prompt's first token.
            values[0] = (None, *values[0][1:])
            top = [None, *top[1:]]
        shown, marks = asked.logprobs, weight_versions(output.delta)
        of_prompt = shown and (bool(prompt) or not self._sends_news)
        return NativeInfo(
            id=self._names[number],
            finish_reason=_finish(output, asked.params),
            prompt_tokens=counts.prompt_tokens if counts else 0,
            completion_tokens=counts.completion_tokens if counts else 0,
            cached_tokens=counts.prompt_tokens_details.cached_tokens if counts else 0,
            input_token_logprobs=values if of_prompt else UNSET,
            input_top_logprobs=top if of_prompt and asked.num_top else UNSET,
            output_token_logprobs=self._logprobs(output.delta.logprobs) if shown else UNSET,
            output_top_logprobs=self._top_logprobs(output.delta.logprobs) if shown and asked.num_top else UNSET,
            output_token_ids_logprobs=self._top_logprobs(output.delta.logprobs) if asked.named else UNSET,
            weight_version=marks[-1][1] if marks else UNSET,
            weight_versions=marks,
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[Logprob]:
        return [self._logprob(entry.sampled) for entry in entries]

    def _top_logprobs(self, entries: Sequence[TokenLogprobs]) -> list[list[Logprob] | None]:
        return [[self._logprob(token) for token in entry.top] for entry in entries]

    def _logprob(self, token: TokenText) -> Logprob:
        return finite(token.logprob), token.token_id, token.text if self._shows_text else None


def _finish(output: Output, params: NativeParams) -> NativeFinish | None:
    match finish_reason(output.delta):
        case None:
            return None
        case "stop":
            return NativeFinish("stop", matched=matched_stop(output.delta))
        case "length":
            return NativeFinish("length", length=_most_tokens(params))
        case reason:
            return NativeFinish(reason)


def _check_lists(body: NativeBody, num_prompts: int) -> None:
    """Raise RequestError for a list that has not an entry for each prompt."""
    for name in PER_PROMPT:
        given = getattr(body, name)
        if not _is_several(name, given):
            continue
        if _is_one(body) or len(given) != num_prompts:
            seen = "one prompt that is no list" if _is_one(body) else f"{num_prompts} prompts"
            raise FieldError(name, f"a list of {len(given)} for {seen}; send an entry for each, or one for all")
        if name == "rid" and len(set(given)) < len(given):
            raise FieldError(name, "two of them are the same")


def _is_one(body: NativeBody) -> bool:
    return isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))


def _is_several(name: str, given: Any) -> bool:
    """Whether a field's value is a list with an entry for each prompt.  Raises RequestError if it may be either."""
    if name != "token_ids_logprob":
        return isinstance(given, list)
    if not given:
        return False
    kinds = {isinstance(one, list) for one in given}
    if len(kinds) > 1:
        raise FieldError(name, "a mixed list; expected token ids, or a list of them for each prompt")
    return kinds.pop()


def _asked(body: NativeBody) -> list[OnePrompt]:
    """Returns what is asked for each prompt; one for all, if that is the same."""
    lengths = {len(given) for name in PER_PROMPT[:-1] if _is_several(name, given := getattr(body, name))}

    def entry(name: str, number: int) -> Any:
        given = getattr(body, name)
        return given[number] if _is_several(name, given) else given

    asked = []
    for number in range(max(lengths, default=1)):
        params, logprobs, start, num_top, named = (entry(name, number) for name in PER_PROMPT[:-1])
        start = start if logprobs and start is not None and start >= 0 else -1
        asked.append(OnePrompt(params or NativeParams(), bool(logprobs), num_top or 0, start, named or []))
    return asked


def _most_tokens(params: NativeParams) -> int:
    return DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens


def _prompt_field(body: NativeBody) -> str:
    return "text" if body.text is not None else "input_ids"
