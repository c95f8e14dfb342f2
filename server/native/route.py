"""POST /generate: text or token ids in, text and token ids out, as SGLang has it; for routers and training loops.

Owns: what may be asked, the flow and the formats.  Does not know: how text is made.
An event of a stream has what is new, text as well as tokens, beside the counts so far.
"""

import uuid
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET

from engine.config import LimitsSection, ServerSection
from engine.errors import RequestError
from engine.messages import TokenLogprobs, TokenText
from server.admission import refuse_early
from server.backend import Ingress
from server.body import BodyReader
from server.choices import Choices
from server.completions import read_prompts
from server.errors import error_body
from server.exchange import EXCHANGE
from server.generation import Generation, Translator
from server.model_card import ModelCard
from server.native.bodies import Logprob, NativeBody, NativeFinish, NativeInfo, NativeOutput, NativeParams
from server.openai_requests import GenerationBody, SamplingFields
from server.output import Output, finish_reason, finite, stop_reason, unpacked
from server.reply import json_reply
from server.sse import EventStream
from server.usage import Tally

DEFAULT_MAX_NEW_TOKENS = 128
# What other layers call what this endpoint calls differently.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
CALLED_OTHERWISE = {
    **{theirs: f"sampling_params, as {ours}" for theirs, ours in RENAMED.items()},
    **dict.fromkeys(("response_format", "structured_outputs"), "sampling_params, as json_schema, regex or ebnf"),
}
Asked = tuple[NativeBody, Generation]


class NativeRoute:
    """Its handler."""

    def __init__(
        self,
        translator: Translator,
        *,
        server: ServerSection,
        limits: LimitsSection,
        ingress: Ingress,
        card: ModelCard,
    ) -> None:
        self._translator = translator
        inside = {**dict.fromkeys(NativeParams.__struct_fields__, "sampling_params"), **CALLED_OTHERWISE}
        self._reader = BodyReader(NativeBody, self._understand, server, elsewhere=inside)
        self._limits = limits
        self._ingress = ingress
        self._card = card

    def _understand(self, body: NativeBody) -> Asked:
        try:
            return body, self._translate(body)
        except RequestError as error:
            raise _in_its_words(error, body) from None

    def _translate(self, body: NativeBody) -> Generation:
        if body.model is not None:
            self._translator.check_model(body.model)
        if body.text is not None and body.input_ids is not None:
            raise RequestError("text: not possible together with input_ids", param="text")
        prompts = body.text if body.text is not None else body.input_ids
        if prompts is None:
            raise RequestError("text: required, but not given; or input_ids", param="text")
        params = body.sampling_params or NativeParams()
        if params.spaces_between_special_tokens is False:
            raise RequestError(
                "spaces_between_special_tokens: cannot be turned off", param="spaces_between_special_tokens"
            )
        most = _most_tokens(params)
        num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
        shared = GenerationBody(
            model=self._card.name,
            stream=body.stream,
            min_tokens=params.min_new_tokens,
            seed=params.sampling_seed,
            include_stop_str_in_output=params.no_stop_trim,
            priority=body.priority,
            cache_salt=body.cache_salt,
            **{name: getattr(params, name) for name in SamplingFields.__struct_fields__},
        )
        return self._translator.translate(
            shared,
            read_prompts(prompts, _prompt_field(body)),  # type: ignore[arg-type]
            max_tokens=max(1, most),
            logprobs=num_top,
            echo=False,
            prompt_logprobs=num_top if _first_told(body) >= 0 else None,
            prompt_only=most == 0,
        )

    async def post(self, request: web.Request) -> web.StreamResponse:
        """aiohttp's handler.  Raises RequestError or EngineDied as long as nothing was sent."""
        refuse_early(self._ingress, self._limits)
        body, generation = await self._reader.read(request)
        answer = _Answer(body, generation)
        request[EXCHANGE].names |= {answer.id, body.request_id or answer.id}
        try:
            async with Choices(self._ingress, generation) as choices:
                if generation.stream:
                    return await self._stream(request, answer, choices)
                outputs = [Output(index) for index in range(choices.num_choices)]
                while (item := await choices.next()) is not None:
                    index, delta = item
                    answer.tally.add(index, delta)
                    outputs[index].add(delta)
                return json_reply(answer.whole(outputs))
        except RequestError as error:
            raise _in_its_words(error, body) from None
        finally:
            request[EXCHANGE].usage = answer.tally.total()

    async def _stream(self, request: web.Request, answer: "_Answer", choices: Choices) -> web.StreamResponse:
        events = EventStream(request)
        return await events.carry(
            self._send_all(events, answer, choices), lambda error: error_body(_in_its_words(error, answer.body))
        )

    async def _send_all(self, events: EventStream, answer: "_Answer", choices: Choices) -> None:
        while (item := await choices.next()) is not None:
            index, delta = item
            answer.tally.add(index, delta)
            if delta.token_ids or delta.finish:
                output = Output(index)
                output.add(delta)
                await events.send([answer.told(output)])


class _Answer:
    """One request's answer.  id: what it is called.  tally: its token counts."""

    def __init__(self, body: NativeBody, generation: Generation) -> None:
        self.id = body.rid or uuid.uuid4().hex
        self.tally = Tally(generation)
        self.body = body
        self._max_tokens = _most_tokens(body.sampling_params or NativeParams())
        prompts = body.text if body.text is not None else body.input_ids
        of_one = isinstance(prompts, str) or (isinstance(prompts, list) and isinstance(prompts[0], int))
        self._is_single = of_one and generation.num_choices == 1

    def whole(self, outputs: Sequence[Output]) -> NativeOutput | list[NativeOutput]:
        """In one piece."""
        told = [self.told(output) for output in outputs]
        return told[0] if self._is_single else told

    def told(self, output: Output) -> NativeOutput:
        """An output, or what is new of it."""
        return NativeOutput(
            text=output.delta.text,
            output_ids=unpacked(output.delta.token_ids),
            index=UNSET if self._is_single else output.index,
            meta_info=self._info(output),
        )

    def _info(self, output: Output) -> NativeInfo:
        counts = self.tally.of_choice(output.index)
        prompt = output.delta.prompt_logprobs[_first_told(self.body) :] if output.delta.prompt_logprobs else ()
        values, top = self._logprobs(prompt), self._top_logprobs(prompt)
        if prompt and _first_told(self.body) == 0:
            # Nothing comes before a prompt's first token.
            values[0] = (None, *values[0][1:])
            top = [None, *top[1:]]
        asked, asked_top = bool(self.body.return_logprob), bool(self.body.top_logprobs_num)
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
        return finite(token.logprob), token.token_id, token.text if self.body.return_text_in_logprobs else None


def _first_told(body: NativeBody) -> int:
    """From which of the prompt's tokens on log probabilities are wanted; -1 for none."""
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    return start if body.return_logprob and start >= 0 else -1


def _most_tokens(params: NativeParams) -> int:
    return DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens


def _prompt_field(body: NativeBody) -> str:
    return "text" if body.text is not None else "input_ids"


def _in_its_words(error: RequestError, body: NativeBody) -> RequestError:
    """Named as the client named it."""
    field = error.param or ""
    if field == "prompt":
        error.param = _prompt_field(body)
    elif (name := RENAMED.get(field, field)) in NativeParams.__struct_fields__:
        error.param = f"sampling_params.{name}"
    return error
