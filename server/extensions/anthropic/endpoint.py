"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API on top of what answers conversations.

Owns: what may be asked, and how a prompt is counted.  Does not know: the order of events, how text is made.
"""

import asyncio

import msgspec
from aiohttp import web

from engine.actors.admission import check_chars, num_chars
from engine.settings.sections import ServerSection
from engine.text.codec import TextCodec
from engine.types.errors import FieldError, RequestError
from engine.types.prompt import ChatOptions, ChatTurn
from server.extensions.anthropic.conversation import (
    BILLING_LEFT_OUT,
    asked_ttl_s,
    continues,
    read_conversation,
    without_billing,
)
from server.extensions.anthropic.objects import MessageError, MessageEvent, MessageObject, TokenCountAnswer
from server.extensions.anthropic.requests import CountBody, MessagesBody, ThinkingOptions
from server.extensions.anthropic.tools import read_message_tools
from server.extensions.anthropic.writer import MessagesWriter
from server.generate.endpoint import Endpoint
from server.generate.generation import Generation
from server.generate.output import UsageCounter
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE
from server.http.operation import generating, operation
from server.http.replies import json_reply
from server.http.sse import PING_EVENT
from server.model_card import ModelCard
from server.openai.conversation import ToolRequest, read_variables
from server.openai.requests import GenerationBody, JsonSchemaFormat, ResponseFormat
from server.openai.translator import Translator

# What templates call the switch for thoughts.
THINKING_VARIABLES = ("enable_thinking", "thinking")
RENAMED = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "tool_choice.function.name": "tool_choice.name",
    "thinking_token_budget": "thinking.budget_tokens",
}


class Messages(Endpoint[MessagesBody]):
    """POST /v1/messages."""

    operation = generating(
        "/v1/messages",
        "Answer a conversation, as blocks.",
        answer=MessageObject,
        body=MessagesBody,
        event=MessageEvent,
        framing="events",
        error=MessageError,
        span="chat",
    )
    body_type = MessagesBody
    ping = PING_EVENT

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: MessagesBody) -> Generation:
        read = without_billing(body)
        generation = self._translated(read)
        return generation if read is body else msgspec.structs.replace(generation, notes=(BILLING_LEFT_OUT,))

    def _translated(self, body: MessagesBody) -> Generation:
        card = self._translator.card
        self._translator.check_model(body.model)
        tools = read_message_tools(body.tools, body.tool_choice, self._translator.tool_format)
        shared = GenerationBody(
            model=body.model,
            stream=body.stream,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            priority=body.priority,
            cache_salt=body.cache_salt,
            thinking_token_budget=self._budget(body.thinking),
            session_id=None if body.metadata is None else body.metadata.user_id,
            prompt_cache_ttl_s=asked_ttl_s(body),
            response_format=_response_format(body),
        )
        return self._translator.translate(
            shared,
            (read_conversation(body, sees=self._translator.sees),),
            # The field is needed, so agents send the largest number that any model takes.
            max_tokens=body.max_tokens if body.max_tokens < card.max_model_len else None,
            logprobs=None,
            effort=None if body.output_config is None else body.output_config.effort,
            tools=tools,
            chat=_chat_options(body, tools, card),
        )

    def _budget(self, thinking: ThinkingOptions | None) -> int | None:
        """Returns the most tokens of thoughts.  Clients always send a budget, so none is refused."""
        if thinking is None or thinking.type != "enabled" or self._translator.limit_thoughts is None:
            return None
        return thinking.budget_tokens

    def rename(self, field: str, body: MessagesBody) -> str:
        if field.startswith("response_format"):
            return "output_config.format" if body.output_format is None else "output_format"
        return RENAMED.get(field, field)

    def writer(self, body: MessagesBody, generation: Generation, usage: UsageCounter) -> MessagesWriter:
        return MessagesWriter(generation, usage, body.model)


class CountRoute:
    """Handles POST /v1/messages/count_tokens."""

    def __init__(self, codec: TextCodec, translator: Translator, server: ServerSection) -> None:
        self._codec = codec
        self._translator = translator
        self._reader = BodyReader(CountBody, self._check, server)

    @operation(
        "POST",
        "/v1/messages/count_tokens",
        "client",
        "Count a prompt.",
        answer=TokenCountAnswer,
        body=CountBody,
        error=MessageError,
    )
    async def post(self, request: web.Request) -> web.Response:
        body, turns = await self._reader.read(request)
        if self._translator.sight is not None:
            turns = await self._translator.sight.read(turns, request[EXCHANGE])
        return json_reply(TokenCountAnswer(await asyncio.to_thread(self._count, body, turns)))

    def _check(self, body: CountBody) -> tuple[CountBody, tuple[ChatTurn, ...]]:
        self._translator.check_model(body.model)
        body = without_billing(body)
        return body, read_conversation(body, sees=self._translator.sees)

    def _count(self, body: CountBody, turns: tuple[ChatTurn, ...]) -> int:
        card = self._translator.card
        tools = read_message_tools(body.tools, body.tool_choice, self._translator.tool_format)
        check_chars(num_chars(turns) + len(tools.described), card.max_model_len, "messages")
        try:
            return len(self._codec.encode_chat(turns, _chat_options(body, tools, card)).token_ids)
        except RequestError as error:
            error.param = RENAMED.get(error.param or "", error.param)
            raise


def _chat_options(body: CountBody, tools: ToolRequest, card: ModelCard) -> ChatOptions:
    goes_on = continues(body)
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        for name in THINKING_VARIABLES:
            if name in card.template_variables:
                variables.setdefault(name, body.thinking.type != "disabled")
    effort = None if body.output_config is None else body.output_config.effort
    return ChatOptions(
        tools=tools.described,
        variables=read_variables(variables, effort, card.template_variables),
        add_generation_prompt=not goes_on,
        continue_final=goes_on,
        split_reasoning=True,
    )


def _response_format(body: MessagesBody) -> ResponseFormat | None:
    configured = None if body.output_config is None else body.output_config.format
    if configured is not None and body.output_format is not None:
        raise FieldError("output_format", "not possible together with output_config.format")
    form = configured or body.output_format
    return None if form is None else ResponseFormat("json_schema", JsonSchemaFormat(form.schema))
