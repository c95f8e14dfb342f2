"""POST /v1/chat/completions: its formats.

Owns: chat completion objects, their logprobs, calls and thoughts in them.
Does not know: messages, chat templates, sockets, the engine.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish
from engine.text.tool_calls import CallPiece, text_and_calls
from engine.types.errors import FieldError
from engine.types.logprobs import TokenLogprobs
from engine.types.prompt import ChatOptions
from server.generate.endpoint import Endpoint
from server.generate.generation import Generation, ResumePoint
from server.generate.output import (
    FinishReason,
    OptionalUsage,
    Output,
    UsageBody,
    UsageCounter,
    finish_reason,
    ids,
    matched_stop,
    stop_reason,
    weight_versions,
)
from server.http.operation import generating
from server.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionCallBody,
    FunctionDelta,
    ToolCallBody,
    ToolCallDelta,
    token_logprob,
)
from server.openai.conversation import read_end, read_tools, read_turns, read_variables
from server.openai.requests import ChatBody
from server.openai.translator import Translator
from server.openai.writer import ChoicesWriter, StreamState


class Chat(Endpoint[ChatBody]):
    """POST /v1/chat/completions."""

    operation = generating(
        "/v1/chat/completions",
        "Answer a conversation.",
        answer=ChatCompletion,
        body=ChatBody,
        event=ChatChunk,
        in_batches=True,
        span="chat",
    )
    body_type = ChatBody

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def translate(self, body: ChatBody) -> Generation:
        self._translator.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs", "only allowed together with logprobs")
        card = self._translator.card
        form = self._translator.tool_format
        tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, form=form)
        begins, continues = read_end(body.add_generation_prompt, body.continue_final_message)
        return self._translator.translate(
            body,
            (read_turns(body.messages, card.template_roles, sees=self._translator.sees),),
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            effort=body.reasoning_effort,
            tools=tools,
            chat=ChatOptions(
                tools=tools.described,
                variables=read_variables(body.chat_template_kwargs, body.reasoning_effort, card.template_variables),
                add_generation_prompt=begins,
                continue_final=continues,
                split_reasoning=body.separate_reasoning is not False,
            ),
        )

    def rename(self, field: str, body: ChatBody) -> str:
        if field == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if field == "prompt" else field

    def writer(self, body: ChatBody, generation: Generation, usage: UsageCounter) -> "ChatWriter":
        return ChatWriter(body, generation, usage, body.model, self._translator.fingerprint)


class ChatWriter(ChoicesWriter):
    """Writes a chat completion, or its chunks."""

    id_prefix = "chatcmpl-"

    def whole(self, outputs: Sequence[Output]) -> ChatCompletion:
        choices = []
        for output in outputs:
            content, calls, cut_off = read_calls(output.delta.text, self.generation, output.index)
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
                    matched_stop=matched_stop(output.delta),
                    token_ids=ids(output.delta.token_ids, self.shows_token_ids),
                    weight_versions=weight_versions(output.delta),
                )
            )
        return ChatCompletion(
            **self.head,
            choices=choices,
            usage=self.usage.total(),
            prompt_token_ids=ids(outputs[0].delta.prompt_token_ids, self.shows_token_ids),
        )

    def chunks(self, state: StreamState, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        chunks: list[msgspec.Struct] = []
        if not state.started:
            state.started = True
            first = ChatChunkChoice(index=state.index, delta=ChatDelta(role="assistant", content=""))
            prompt_ids = ids(delta.prompt_token_ids, bool(delta.prompt_token_ids))
            chunks.append(msgspec.structs.replace(self._chunk([first], usage), prompt_token_ids=prompt_ids))
        text = delta.text
        calls: list[ToolCallDelta] | UnsetType = UNSET
        reason = finish_reason(delta)
        if (parser := state.parser) is not None:
            parts = parser.push(text)
            if delta.finish != Finish.RUNNING:
                parts += parser.finish()
            text, pieces = text_and_calls(parts)
            calls = [_call_delta(piece, self.generation.origin, state.index) for piece in pieces] or UNSET
            reason = _with_calls(reason, parser.num_calls > 0 and not parser.cut_off)
        thoughts = delta.reasoning or UNSET
        shows_text = text or (delta.token_ids and not thoughts and state.parser is None)
        choice = ChatChunkChoice(
            index=state.index,
            delta=ChatDelta(
                content=text if shows_text else UNSET, tool_calls=calls, reasoning_content=thoughts, reasoning=thoughts
            ),
            logprobs=_logprobs(delta.logprobs),
            finish_reason=reason,
            stop_reason=stop_reason(delta),
            matched_stop=matched_stop(delta),
            token_ids=ids(delta.token_ids, self.shows_token_ids and bool(delta.token_ids)),
            weight_versions=weight_versions(delta),
        )
        held_back = state.parser is not None and choice == ChatChunkChoice(index=state.index, delta=ChatDelta())
        if not held_back:
            chunks.append(self._chunk([choice], usage))
        return chunks

    def usage_chunk(self, usage: UsageBody) -> ChatChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: OptionalUsage) -> ChatChunk:
        return ChatChunk(**self.head, choices=choices, usage=usage)


def read_calls(text: str, generation: Generation, choice: int) -> tuple[str, list[ToolCallBody], bool]:
    """Returns (text, calls, whether the last call is cut off) of the whole output of a choice."""
    if generation.new_parser is None:
        return text, [], False
    parser, origin = generation.new_parser(), generation.origin
    content, pieces = text_and_calls([*parser.push(text), *parser.finish()])
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        if piece.name is not None:
            names[piece.index] = piece.name
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    calls = [
        ToolCallBody(call_id(origin, choice, index), FunctionCallBody(name, arguments[index]))
        for index, name in names.items()
    ]
    return content, calls, parser.cut_off


def call_id(origin: ResumePoint, choice: int, index: int) -> str:
    """Returns the id by which a client's answer refers to a call of a choice: the same wherever it is written."""
    return f"call_{origin.name((choice << 32) + index)[:24]}"


def _call_delta(piece: CallPiece, origin: ResumePoint, choice: int) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(piece.name, piece.arguments)
    return ToolCallDelta(piece.index, function, id=call_id(origin, choice, piece.index), type="function")


def _with_calls(reason: FinishReason | None, calls: bool) -> FinishReason | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _logprobs(entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
    return ChatLogprobs([token_logprob(entry) for entry in entries]) if entries else None
