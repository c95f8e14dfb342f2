"""POST /v1/responses: an answer as one object, or as the events of its making.

Owns: what may be asked and the flow.  Does not know: the order of events.
"""

import json
import time
import uuid

import msgspec
from aiohttp import web
from msgspec import UnsetType

from engine.errors import RequestError
from engine.messages import ChatOptions, Delta, Finish
from engine.sections import LimitsSection, ServerSection
from server.admission import refuse_early
from server.backend import Ingress
from server.generate.choices import Choices
from server.generate.generation import Generation
from server.generate.output import by_id
from server.generate.usage import Tally, UsageBody
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE
from server.http.sse import EventStream
from server.model_card import ModelCard
from server.openai.requests import (
    FunctionBody,
    FunctionChoice,
    JsonSchemaFormat,
    ResponseFormat,
    ToolBody,
    ToolChoice,
    is_given,
)
from server.openai.template_variables import read_variables
from server.openai.tools import read_tools
from server.openai.translator import Translator
from server.reply import json_reply
from server.responses.items import read_input
from server.responses.objects import (
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from server.responses.requests import FlatToolChoice, ResponsesBody, TextFormat
from server.responses.writer import ResponseWriter

LOGPROBS = "message.output_text.logprobs"
Asked = tuple[ResponsesBody, Generation]


class ResponsesRoute:
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
        self._reader = BodyReader(ResponsesBody, self._understand, server)
        self._limits = limits
        self._ingress = ingress
        self._card = card

    def _understand(self, body: ResponsesBody) -> Asked:
        _refuse_what_needs_a_store(body)
        try:
            return self._translate(body)
        except RequestError as error:
            raise _in_its_words(error, body) from None

    def _translate(self, body: ResponsesBody) -> Asked:
        self._translator.check_model(body.model)
        choice = body.tool_choice
        tools = read_tools(
            [
                ToolBody(tool.type, FunctionBody(tool.name, tool.description, tool.parameters, tool.strict))
                for tool in body.tools or ()
            ],
            ToolChoice(choice.type, FunctionChoice(choice.name)) if isinstance(choice, FlatToolChoice) else choice,
            parallel=body.parallel_tool_calls,
            form=self._card.tool_format,
        )
        if body.text is not None and body.text.format is not None:
            if body.response_format is not None:
                raise RequestError("response_format: this endpoint calls it text.format", param="response_format")
            body = msgspec.structs.replace(body, response_format=_response_format(body.text.format))
        effort = None if body.reasoning is None else body.reasoning.effort
        wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        generation = self._translator.translate(
            body,
            (read_input(body.input, body.instructions),),
            max_tokens=body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
            echo=False,
            tools=tools,
            chat=ChatOptions(
                tools=tools.described,
                variables=read_variables(body.chat_template_kwargs, effort, self._card.template_variables),
                split_reasoning=True,
            ),
        )
        return body, generation

    async def post(self, request: web.Request) -> web.StreamResponse:
        """aiohttp's handler.  Raises RequestError or EngineDied as long as nothing was sent."""
        refuse_early(self._ingress, self._limits)
        body, generation = await self._reader.read(request)
        answer = _Answer(body, generation, self._card.name)
        request[EXCHANGE].names |= {answer.id, generation.request_id} - {""}
        try:
            async with Choices(self._ingress, generation) as choices:
                if generation.stream:
                    return await self._stream(request, answer, choices)
                while (item := await choices.next()) is not None:
                    answer.take(item)
                return json_reply(answer.object())
        except RequestError as error:
            raise _in_its_words(error, body) from None
        finally:
            usage = answer.tally.total()
            request[EXCHANGE].usage = usage.prompt_tokens, usage.completion_tokens

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """aiohttp's handler for whatever is asked about a response that was given before.  Raises RequestError: 404."""
        raise RequestError(
            "responses are not stored by this server; a running one ends when its connection is closed",
            status=404,
            code="response_not_found",
        )

    async def _stream(self, request: web.Request, answer: "_Answer", choices: Choices) -> web.StreamResponse:
        events = EventStream(request, named=True)

        def last_word(error: RequestError) -> Event:
            reason = _in_its_words(error, answer.body)
            return answer.writer.event("failed", response=answer.object("failed", reason))

        return await events.carry(self._send_all(events, answer, choices), last_word)

    async def _send_all(self, events: EventStream, answer: "_Answer", choices: Choices) -> None:
        writer = answer.writer
        while (item := await choices.next()) is not None:
            told: list[Event] = []
            if not events.started:
                started = answer.object("in_progress")
                told = [writer.event(kind, response=started) for kind in ("created", "in_progress")]
            told += answer.take(item)
            if told:
                await events.send(told)
        whole = answer.object()
        kind = "incomplete" if whole.status == "cancelled" else whole.status  # it has no event of its own
        await events.send([writer.event(kind, response=whole)])


class _Answer:
    """One request's answer as it grows.  id: of the response.  tally: its token counts.  writer: its items."""

    def __init__(self, body: ResponsesBody, generation: Generation, model: str) -> None:
        self.tally = Tally(generation)
        self.writer = ResponseWriter(generation.tools.parser() if generation.tools else None)
        self.body = body
        self._params = generation.params
        self._names_by_id = generation.names_tokens_by_id
        self._model = model
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._finish = Finish.RUNNING

    def take(self, item: tuple[int, Delta]) -> list[Event]:
        """New output."""
        index, delta = item
        self.tally.add(index, delta)
        self._finish = delta.finish
        return self.writer.take(by_id(delta) if self._names_by_id else delta)

    def object(self, status: Status | None = None, error: RequestError | None = None) -> ResponseObject:
        """What there is to say.  status: None once the output has ended."""
        body, params = self.body, self._params
        cut = status is None and self._finish == Finish.LENGTH
        ended: Status = "incomplete" if cut else "cancelled" if self._finish == Finish.ABORT else "completed"
        given = json.loads(msgspec.json.encode(body))
        return ResponseObject(
            id=self.id,
            created_at=self._created_at,
            status=status or ended,
            error=None if error is None else ResponseError(error.code, error.message),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._model,
            output=list(self.writer.output) if status != "in_progress" else [],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            temperature=params.temperature,
            text=given["text"] or {"format": {"type": "text"}},
            tool_choice=given["tool_choice"] or "auto",
            tools=given["tools"] or [],
            top_p=params.top_p,
            usage=None if status == "in_progress" else _usage(self.tally.total()),
            metadata=body.metadata or {},
        )


def _usage(counts: UsageBody) -> ResponseUsage:
    details = counts.completion_tokens_details
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputTokensDetails(counts.prompt_tokens_details.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(0 if isinstance(details, UnsetType) else details.reasoning_tokens),
        total_tokens=counts.total_tokens,
    )


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(given.type, schema=given.schema)
    if not is_given(given.schema):
        raise RequestError("text.format.schema: required, but not given", param="text.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(given.schema, given.name))


def _refuse_what_needs_a_store(body: ResponsesBody) -> None:
    """Nothing is kept between requests, and leaving these out of account would change the answer."""
    kept = "nothing is kept between requests; send the whole conversation as input"
    asked = {
        "previous_response_id": (body.previous_response_id is not None, kept),
        "conversation": (is_given(body.conversation), kept),
        "prompt": (is_given(body.prompt), "no prompts are kept; send their text as instructions and input"),
        "background": (bool(body.background), "no answers are kept to be asked for later"),
        "truncation": (body.truncation == "auto", "nothing is cut off; an input that is too long is an error"),
        "n": (body.n not in (None, 1), "a response has one output"),
    }
    for field, (given, why) in asked.items():
        if given:
            raise RequestError(f"{field}: not supported, since {why}", code="unsupported_parameter", param=field)


def _in_its_words(error: RequestError, body: ResponsesBody) -> RequestError:
    """Other layers have other names for what this endpoint calls differently; what the client used is told to it."""
    if error.param in ("prompt", "messages"):
        error.param = "input"
    elif error.param == "max_tokens" and body.max_output_tokens is not None:
        error.param = "max_output_tokens"
    elif error.param is not None and error.param.startswith("response_format") and body.text is not None:
        error.param = error.param.replace("response_format", "text.format", 1)
    return error
