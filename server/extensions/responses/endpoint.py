"""POST /v1/responses: an answer as one object, or as the events of its making.

Owns: what may be asked, and what is said of the answer.  Does not know: the order of events.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish
from engine.types.errors import FieldError, RequestError
from engine.types.prompt import ChatOptions
from server.extensions.responses.item_writer import ItemWriter
from server.extensions.responses.items import read_input
from server.extensions.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
)
from server.extensions.responses.requests import ResponsesBody, TextFormat
from server.extensions.responses.tools import KINDS, callees, read_response_tools
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageBody, UsageCounter
from server.http.body import is_given
from server.http.operation import generating
from server.openai.conversation import read_variables
from server.openai.requests import JsonSchemaFormat, ResponseFormat
from server.openai.translator import Translator

LOGPROBS = "message.output_text.logprobs"
UNDER_WAY: tuple[Status | None, ...] = ("queued", "in_progress")


class Responses(Endpoint[ResponsesBody]):
    """POST /v1/responses."""

    operation = generating(
        "/v1/responses",
        "Answer a conversation, as items.",
        answer=ResponseObject,
        body=ResponsesBody,
        event=ResponseEvent,
        framing="events",
        in_batches=True,
        span="chat",
    )
    body_type = ResponsesBody
    repeats_logprobs = True

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: ResponsesBody) -> Generation:
        _refuse_what_needs_a_store(body)
        self._translator.check_model(body.model)
        tools = read_response_tools(body, self._translator.tool_format)
        if body.text is not None and body.text.format is not None:
            if body.response_format is not None:
                raise FieldError("response_format", "this endpoint calls it text.format")
            body = msgspec.structs.replace(body, response_format=_response_format(body.text.format))
        effort = None if body.reasoning is None else body.reasoning.effort
        wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        return self._translator.translate(
            body,
            (read_input(body.input, body.instructions, sees=self._translator.sees),),
            max_tokens=_max_tokens(body),
            logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
            effort=effort,
            tools=tools,
            chat=ChatOptions(
                tools=tools.described,
                variables=read_variables(body.chat_template_kwargs, effort, self._translator.card.template_variables),
                split_reasoning=True,
            ),
        )

    def rename(self, field: str, body: ResponsesBody) -> str:
        if field == "messages" or (field == "prompt" and not is_given(body.prompt)):
            return "input"
        if field == "max_tokens" and body.max_output_tokens is not None:
            return "max_output_tokens"
        return field.replace("response_format", "text.format", 1) if body.text is not None else field

    def writer(self, body: ResponsesBody, generation: Generation, usage: UsageCounter) -> "ResponsesWriter":
        return ResponsesWriter(body, generation, usage, body.model)


class ResponsesWriter(Writer):
    """Writes a response object, or the events of its making."""

    def __init__(self, body: ResponsesBody, generation: Generation, usage: UsageCounter, model: str) -> None:
        self.id = f"resp_{generation.origin.key.hex}"
        self._usage = usage
        self._items = ItemWriter(generation.origin, generation.new_parser and generation.new_parser(), callees(body))
        self._body = body
        self._params = generation.params
        self._model = model
        self._created_at = int(generation.origin.created)
        self._finish = Finish.RUNNING
        self._started = False
        self._keeping: Awaitable[None] | None = None
        self.keep: Callable[[ResponseObject], Awaitable[None]] | None = None  # set where the answer is stored

    def whole(self, outputs: Sequence[Output]) -> ResponseObject:
        (output,) = outputs
        self._items.take(output.delta)
        self._finish = output.delta.finish
        return self._ended()

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if not self._started:
            self._started = True
            started = self._object("in_progress")
            events += [self._items.event(kind, response=started) for kind in ("created", "in_progress")]
        self._finish = delta.finish
        return events + self._items.take(delta)

    def go_on_after(self, num_events: int) -> None:
        self._items.num_events = num_events

    def last_events(self) -> list[msgspec.Struct]:
        whole = self._ended()
        kind = "incomplete" if whole.status == "cancelled" else whole.status  # it has no event of its own
        return [self._items.event(kind, response=whole)]

    def failure(self, error: RequestError) -> msgspec.Struct:
        return self._items.event("failed", response=self._object("failed", error))

    async def kept(self) -> None:
        """Wait until the answer is stored, if it is to be.  Raises RequestError if it cannot be."""
        if self._keeping is not None:
            await self._keeping

    def queued(self) -> ResponseObject:
        """Returns the response as it is before its work begins."""
        return self._object("queued")

    def _ended(self) -> ResponseObject:
        whole = self._object()
        if self.keep is not None:
            self._keeping = self.keep(whole)
        return whole

    def _object(self, status: Status | None = None, error: RequestError | None = None) -> ResponseObject:
        """Returns the response as it is now.  status: None once the output has ended."""
        body, params = self._body, self._params
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
            max_output_tokens=_max_tokens(body),
            model=self._model,
            output=[] if status in UNDER_WAY else list(self._items.output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            background=bool(body.background),
            store=self.keep is not None,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            temperature=params.temperature,
            text=given["text"] or {"format": {"type": "text"}},
            tool_choice=_without_nulls(given["tool_choice"]) or "auto",
            tools=[_tool_body(tool) for tool in given["tools"] or () if tool["type"] in (*KINDS, "namespace")],
            top_p=params.top_p,
            usage=None if status in UNDER_WAY else _usage(self._usage.total()),
            metadata=body.metadata or {},
            weight_versions=UNSET if status in UNDER_WAY else self._usage.weight_versions,
        )


def _tool_body(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as it was given; a function has each of its fields, as clients' types demand."""
    told = _without_nulls(tool)
    nulls = ("description", "parameters", "strict") if tool["type"] == "function" else ()
    return {**dict.fromkeys(nulls), **told}


def _without_nulls(given: Any) -> Any:
    """Returns JSON without fields that are null; in the schema of a tool's parameters null is a value."""
    if isinstance(given, dict):
        return {
            name: value if name == "parameters" else _without_nulls(value)
            for name, value in given.items()
            if value is not None
        }
    return [_without_nulls(one) for one in given] if isinstance(given, list) else given


def _max_tokens(body: ResponsesBody) -> int | None:
    return body.max_tokens if body.max_output_tokens is None else body.max_output_tokens


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
        raise FieldError("text.format.schema", "required, but not given")
    return ResponseFormat("json_schema", JsonSchemaFormat(given.schema, given.name))


def _refuse_what_needs_a_store(body: ResponsesBody) -> None:
    """Raise RequestError for a field that needs kept state: ignoring it would change the answer."""
    off = "storage.folder is empty, or this is a line of a batch"
    kept = f"nothing is kept between requests ({off}); send the whole conversation as input"
    asked = {
        "previous_response_id": (body.previous_response_id is not None, kept),
        "conversation": (is_given(body.conversation), kept),
        "prompt": (is_given(body.prompt), "no prompts are kept; send their text as instructions and input"),
        "background": (bool(body.background), f"no answers are kept to be asked for later ({off})"),
        "truncation": (body.truncation == "auto", "nothing is cut off; an input that is too long is an error"),
        "n": (body.n not in (None, 1), "a response has one output"),
    }
    for field, (given, why) in asked.items():
        if given:
            raise FieldError(field, f"not supported, since {why}", code="unsupported_parameter")
