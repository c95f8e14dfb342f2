"""POST /generate: text or token ids in, text and token ids out, as SGLang has it; for routers and training loops.

Owns: what may be asked, and the formats.  Does not know: how text is made.
An event of a stream has what is new, text as well as tokens, beside the counts so far.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET

from engine.errors import FieldError
from engine.messages import Delta, TokenLogprobs, TokenText
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter, finish_reason, finite, stop_reason, unpacked
from server.native.bodies import Logprob, NativeBody, NativeFinish, NativeInfo, NativeOutput, NativeParams
from server.openai.completions import read_prompts
from server.openai.requests import GenerationBody, SamplingFields
from server.openai.translator import Translator

DEFAULT_MAX_NEW_TOKENS = 128
# What other layers call what this endpoint calls differently.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class Native(Endpoint[NativeBody]):
    """POST /generate."""

    body_type = NativeBody
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
        prompts = body.text if body.text is not None else body.input_ids
        if prompts is None:
            raise FieldError("text", "required, but not given; or input_ids")
        params = body.sampling_params or NativeParams()
        if params.spaces_between_special_tokens is False:
            raise FieldError("spaces_between_special_tokens", "cannot be turned off")
        most = _most_tokens(params)
        num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
        shared = GenerationBody(
            model=self._translator.card.name,
            stream=body.stream,
            min_tokens=params.min_new_tokens,
            seed=params.sampling_seed,
            include_stop_str_in_output=params.no_stop_trim,
            priority=body.priority,
            cache_salt=body.cache_salt,
            request_id=body.request_id,
            **{name: getattr(params, name) for name in SamplingFields.__struct_fields__},
        )
        return self._translator.translate(
            shared,
            read_prompts(prompts, _prompt_field(body)),
            max_tokens=max(1, most),
            logprobs=num_top,
            prompt_logprobs=num_top if _first_told(body) >= 0 else None,
            prompt_only=most == 0,
        )

    def rename(self, field: str, body: NativeBody) -> str:
        if field == "prompt":
            return _prompt_field(body)
        name = RENAMED.get(field, field)
        return f"sampling_params.{name}" if name in NativeParams.__struct_fields__ else field

    def writer(self, body: NativeBody, generation: Generation, usage: UsageCounter) -> "NativeWriter":
        return NativeWriter(body, generation, usage)


class NativeWriter(Writer):
    """Writes an output, or a list of them."""

    def __init__(self, body: NativeBody, generation: Generation, usage: UsageCounter) -> None:
        self.id = body.rid or uuid.uuid4().hex
        self._usage = usage
        self._body = body
        self._max_tokens = _most_tokens(body.sampling_params or NativeParams())
        prompts = body.text if body.text is not None else body.input_ids
        of_one = isinstance(prompts, str) or (isinstance(prompts, list) and isinstance(prompts[0], int))
        self._is_single = of_one and generation.num_choices == 1

    def whole(self, outputs: Sequence[Output]) -> NativeOutput | list[NativeOutput]:
        told = [self._told(output) for output in outputs]
        return told[0] if self._is_single else told

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        if not delta.token_ids and not delta.finish:
            return []
        output = Output(index)
        output.add(delta)
        return [self._told(output)]

    def _told(self, output: Output) -> NativeOutput:
        """Returns an output, or what is new of it, in this format."""
        return NativeOutput(
            text=output.delta.text,
            output_ids=unpacked(output.delta.token_ids),
            index=UNSET if self._is_single else output.index,
            meta_info=self._info(output),
        )

    def _info(self, output: Output) -> NativeInfo:
        counts = self._usage.of_choice(output.index)
        prompt = output.delta.prompt_logprobs[_first_told(self._body) :] if output.delta.prompt_logprobs else ()
        values, top = self._logprobs(prompt), self._top_logprobs(prompt)
        if prompt and _first_told(self._body) == 0:
            # Nothing comes before a prompt's first token.
            values[0] = (None, *values[0][1:])
            top = [None, *top[1:]]
        asked, asked_top = bool(self._body.return_logprob), bool(self._body.top_logprobs_num)
        return NativeInfo(
            id=self.id,
            finish_reason=self._finish(output),
            prompt_tokens=counts.prompt_tokens if counts else 0,
            completion_tokens=counts.completion_tokens if counts else 0,
            cached_tokens=counts.prompt_tokens_details.cached_tokens if counts else 0,
            input_token_logprobs=values if prompt else UNSET,
            input_top_logprobs=top if prompt and asked_top else UNSET,
            output_token_logprobs=self._logprobs(output.delta.logprobs) if asked else UNSET,
            output_top_logprobs=self._top_logprobs(output.delta.logprobs) if asked and asked_top else UNSET,
        )

    def _finish(self, output: Output) -> NativeFinish | None:
        match finish_reason(output.delta):
            case None:
                return None
            case "stop":
                return NativeFinish("stop", matched=stop_reason(output.delta))
            case "length":
                return NativeFinish("length", length=self._max_tokens)
            case reason:
                return NativeFinish(reason)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[Logprob]:
        return [self._logprob(entry.sampled) for entry in entries]

    def _top_logprobs(self, entries: Sequence[TokenLogprobs]) -> list[list[Logprob] | None]:
        return [[self._logprob(token) for token in entry.top] for entry in entries]

    def _logprob(self, token: TokenText) -> Logprob:
        return finite(token.logprob), token.token_id, token.text if self._body.return_text_in_logprobs else None


def _first_told(body: NativeBody) -> int:
    """Returns from which prompt token on log probabilities are wanted; -1 for none."""
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    return start if body.return_logprob and start >= 0 else -1


def _most_tokens(params: NativeParams) -> int:
    return DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens


def _prompt_field(body: NativeBody) -> str:
    return "text" if body.text is not None else "input_ids"
