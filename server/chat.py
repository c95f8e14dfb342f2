"""POST /v1/chat/completions: its formats.

Owns: chat completion objects, their logprobs, calls and thoughts in them.
Does not know: messages, chat templates, sockets, the engine.
"""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from engine.errors import RequestError
from engine.messages import ChatOptions, Delta, Finish, TokenLogprobs, TokenText
from engine.text.tool_calls import CallPiece, text_and_calls
from server.conversation import read_end, read_turns
from server.endpoint import Head
from server.generation import Generation, Translator
from server.model_card import ModelCard
from server.openai_requests import ChatBody
from server.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FinishReason,
    FunctionCallBody,
    FunctionDelta,
    OptionalUsage,
    TokenLogprob,
    ToolCallBody,
    ToolCallDelta,
    TopLogprob,
    UsageBody,
)
from server.output import Cursor, Output, finish_reason, finite, ids, stop_reason
from server.template_variables import read_variables
from server.tools import ToolUse, read_tools


class Chat:
    """The chat endpoint."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, translator: Translator, card: ModelCard) -> None:
        self._translator = translator
        self._card = card

    def translate(self, body: ChatBody) -> Generation:
        self._translator.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs: only allowed together with logprobs", param="top_logprobs")
        tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, form=self._card.tool_format)
        generation = self._translator.translate(
            body,
            (read_turns(body.messages),),
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            echo=False,
            tools=tools,
            chat=self._options(body, tools.described),
        )
        if body.max_completion_tokens is None:
            return generation
        return msgspec.structs.replace(generation, max_tokens_field="max_completion_tokens")

    def _options(self, body: ChatBody, tools: str) -> ChatOptions:
        begins, continues = read_end(body.add_generation_prompt, body.continue_final_message)
        return ChatOptions(
            tools=tools,
            variables=read_variables(body.chat_template_kwargs, body.reasoning_effort, self._card.template_variables),
            add_generation_prompt=begins,
            continue_final=continues,
            split_reasoning=body.separate_reasoning is not False,
        )

    def answer(self, head: Head, generation: Generation, outputs: Sequence[Output], usage: UsageBody) -> msgspec.Struct:
        choices = []
        for output in outputs:
            content, calls, cut_off = read_calls(output.delta.text, generation.tools)
            choices.append(
                ChatChoice(
                    index=output.index,
                    message=ChatAnswer(
                        content if content or not calls else None,
                        tool_calls=calls or UNSET,
                        reasoning_content=output.delta.reasoning or UNSET,
                        reasoning=output.delta.reasoning or UNSET,
                    ),
                    logprobs=_logprobs(output.delta.logprobs),
                    finish_reason=_with_calls(finish_reason(output.delta), bool(calls) and not cut_off),
                    stop_reason=stop_reason(output.delta),
                    token_ids=ids(output.delta.token_ids, generation.shows_token_ids),
                )
            )
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=ids(outputs[0].delta.prompt_token_ids, generation.shows_token_ids),
        )

    def chunks(self, head: Head, cursor: Cursor, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        chunks: list[msgspec.Struct] = []
        if not cursor.started:
            cursor.started = True
            first = ChatChunkChoice(index=cursor.index, delta=ChatDelta(role="assistant", content=""))
            prompt_ids = ids(delta.prompt_token_ids, bool(delta.prompt_token_ids))
            chunks.append(msgspec.structs.replace(_chunk(head, [first], usage), prompt_token_ids=prompt_ids))
        text = delta.text
        calls: list[ToolCallDelta] | UnsetType = UNSET
        reason = finish_reason(delta)
        if (parser := cursor.parser) is not None:
            parts = parser.push(text)
            if delta.finish != Finish.RUNNING:
                parts += parser.finish()
            text, pieces = text_and_calls(parts)
            calls = [_call_delta(piece) for piece in pieces] or UNSET
            reason = _with_calls(reason, parser.num_calls > 0 and not parser.cut_off)
        thoughts = delta.reasoning or UNSET
        shows_text = text or (delta.token_ids and not thoughts and cursor.parser is None)
        choice = ChatChunkChoice(
            index=cursor.index,
            delta=ChatDelta(
                content=text if shows_text else UNSET,
                tool_calls=calls,
                reasoning_content=thoughts,
                reasoning=thoughts,
            ),
            logprobs=_logprobs(delta.logprobs),
            finish_reason=reason,
            stop_reason=stop_reason(delta),
            token_ids=ids(delta.token_ids, cursor.shows_token_ids and bool(delta.token_ids)),
        )
        held_back = cursor.parser is not None and choice == ChatChunkChoice(index=cursor.index, delta=ChatDelta())
        if not held_back:
            chunks.append(_chunk(head, [choice], usage))
        return chunks

    def usage_chunk(self, head: Head, usage: UsageBody) -> msgspec.Struct:
        return _chunk(head, [], usage)


def read_calls(text: str, tools: ToolUse | None) -> tuple[str, list[ToolCallBody], bool]:
    """(text, calls, whether the last call is cut off) of a whole output."""
    if tools is None:
        return text, [], False
    parser = tools.parser()
    content, pieces = text_and_calls([*parser.push(text), *parser.finish()])
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        if piece.name is not None:
            names[piece.index] = piece.name
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    calls = [ToolCallBody(new_call_id(), FunctionCallBody(name, arguments[index])) for index, name in names.items()]
    return content, calls, parser.cut_off


def new_call_id() -> str:
    """By which the client's answer refers to a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _call_delta(piece: CallPiece) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(piece.name, piece.arguments)
    return ToolCallDelta(piece.index, function, id=new_call_id(), type="function")


def _with_calls(reason: FinishReason | None, calls: bool) -> FinishReason | None:
    return "tool_calls" if calls and reason == "stop" else reason


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
