"""POST /v1/chat/completions: its messages and its formats.

Owns: roles, content parts, chat completion objects, their logprobs.
Does not know: chat templates, sockets, the engine.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from engine.errors import RequestError
from engine.messages import ChatTurn, Delta, TokenLogprobs, TokenText
from server.endpoint import Head
from server.generation import Generation, Translator
from server.openai_requests import ChatBody, ChatMessage, ContentPart
from server.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    OptionalUsage,
    TokenLogprob,
    TopLogprob,
    UsageBody,
)
from server.output import Cursor, Output, finish_reason, finite, stop_reason

# The API renamed "system" to "developer"; templates of open models know only the old name.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Chat:
    """The chat endpoint."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: ChatBody) -> Generation:
        self._translator.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs: only allowed together with logprobs", param="top_logprobs")
        return self._translator.translate(
            body,
            (read_turns(body.messages),),
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            echo=False,
        )

    def answer(self, head: Head, outputs: Sequence[Output], usage: UsageBody) -> msgspec.Struct:
        choices = [
            ChatChoice(
                index=output.index,
                message=ChatAnswer(output.text),
                logprobs=_logprobs(output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in outputs
        ]
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def chunks(self, head: Head, cursor: Cursor, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        chunks: list[msgspec.Struct] = []
        if not cursor.started:
            cursor.started = True
            first = ChatChunkChoice(index=cursor.index, delta=ChatDelta(role="assistant", content=""))
            chunks.append(_chunk(head, [first], usage))
        choice = ChatChunkChoice(
            index=cursor.index,
            delta=ChatDelta(content=delta.text if delta.text or delta.token_ids else UNSET),
            logprobs=_logprobs(delta.logprobs),
            finish_reason=finish_reason(delta),
            stop_reason=stop_reason(delta),
        )
        chunks.append(_chunk(head, [choice], usage))
        return chunks

    def usage_chunk(self, head: Head, usage: UsageBody) -> msgspec.Struct:
        return _chunk(head, [], usage)


def read_turns(messages: Sequence[ChatMessage]) -> tuple[ChatTurn, ...]:
    """The conversation in the engine's terms.  Raises RequestError for what only other models could read."""
    if not messages:
        raise RequestError("messages: an empty list; expected at least one message", param="messages")
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def _turn(message: ChatMessage, path: str) -> ChatTurn:
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(f"{path}.role: must be one of {', '.join(ROLES)}", param=f"{path}.role")
    for field in ("tool_calls", "function_call"):
        calls = getattr(message, field)
        if calls:
            raise RequestError(
                f"{path}.{field}: not supported by this server", code="unsupported_parameter", param=f"{path}.{field}"
            )
    if isinstance(message.content, str):
        return ChatTurn(role, message.content)
    if not message.content:
        raise RequestError(f"{path}.content: required, but not given", param=f"{path}.content")
    parts = (_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(message.content))
    return ChatTurn(role, "".join(parts))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise RequestError(
            f"{path}.type: only 'text' is supported by this server", code="unsupported_content", param=f"{path}.type"
        )
    if part.text is None:
        raise RequestError(f"{path}.text: required, but not given", param=f"{path}.text")
    return part.text


def _chunk(head: Head, choices: list[ChatChunkChoice], usage: OptionalUsage) -> ChatChunk:
    return ChatChunk(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def _logprobs(entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    if not entries:
        return None
    return ChatLogprobs(
        [
            TokenLogprob(
                token=entry.sampled.text,
                logprob=finite(entry.sampled.logprob),
                bytes=list(entry.sampled.utf8),
                top_logprobs=[_top_logprob(token) for token in entry.top],
            )
            for entry in entries
        ]
    )


def _top_logprob(token: TokenText) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=finite(token.logprob), bytes=list(token.utf8))
