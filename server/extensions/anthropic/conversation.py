"""Messages made of blocks as turns of a conversation.

Owns: which blocks belong to one turn, what is left out, what is refused.  Does not know: chat templates, answers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import ChatTurn, Picture, ToolCall
from server.extensions.anthropic.requests import BlockBody, BlockSource, CountBody, MessageBody
from server.openai.content import Content, GivenPicture, joined, read_address
from server.openai.conversation import left_out_note, needed, num_answered

# A line about the client's version, the session and the request, which Claude Code puts in front of its system prompt:
# in the prompt it would keep sessions, and with some versions turns, from sharing what is cached.
BILLING = "x-anthropic-billing-header:"
BILLING_LEFT_OUT = (
    "The system prompt's line that begins with x-anthropic-billing-header was left out, so that what follows it can be "
    "found in the cache."
)
# Calls that Anthropic ran, and thoughts that it alone can read; results of the former end in RESULT.
LEFT_OUT = frozenset({"redacted_thinking", "server_tool_use", "mcp_tool_use"})
RESULT = "_tool_result"
TTLS = {"5m": 300.0, "1h": 3600.0}
B = TypeVar("B", bound=CountBody)


def without_billing(body: B) -> B:
    """Returns the body without its lines for the client's billing; the same object if there are none."""
    kept = [_without_billing(message) for message in body.messages]
    system = None if body.system is None else _plain_blocks(body.system)
    if system is body.system and all(one is message for one, message in zip(kept, body.messages, strict=True)):
        return body
    return msgspec.structs.replace(body, messages=kept, system=system)


def _without_billing(message: MessageBody) -> MessageBody:
    content = _plain_blocks(message.content) if message.role == "system" else message.content
    return message if content is message.content else msgspec.structs.replace(message, content=content)


def _plain_blocks(content: str | list[BlockBody]) -> str | list[BlockBody]:
    if isinstance(content, str):
        return content
    kept = [block for block in content if not (block.type == "text" and (block.text or "").startswith(BILLING))]
    return content if len(kept) == len(content) else kept


def read_conversation(body: CountBody, *, sees: bool = False) -> tuple[ChatTurn, ...]:
    """Returns the conversation in the engine's terms.  sees: the model reads pictures.  Raises RequestError."""
    if not body.messages:
        raise FieldError("messages", "an empty list; expected at least one message")
    turns: list[ChatTurn] = []
    if body.system and (system := _system_text(body.system, "system")):
        turns.append(ChatTurn("system", system))
    answered = num_answered([message.role for message in body.messages])
    is_empty = True
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}].content", past=index < answered, sees=sees):
            _add(turns, turn)
            is_empty = is_empty and turn == ChatTurn("assistant", "")
    if is_empty:
        raise _nothing_to_read(body.messages)
    return tuple(turns)


def _nothing_to_read(messages: Sequence[MessageBody]) -> FieldError:
    blocks = [block for message in messages if not isinstance(message.content, str) for block in message.content]
    kinds = ", ".join(sorted({block.type[:40] for block in blocks})[:8])
    held = f"only {kinds}" if kinds else "no blocks"
    return FieldError("messages", f"they hold no text, thoughts, calls or results ({held}); send a block of text")


def _system_text(content: str | Sequence[BlockBody], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = [_block_text(block, f"{path}[{index}]") for index, block in enumerate(content)]
    return "\n".join(texts)


def asked_ttl_s(body: CountBody) -> float:
    """Returns the longest time for which the client wants the prompt to be kept; 0 if it names none."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    asked = [block.cache_control.ttl or "" for block in blocks if block.cache_control is not None]
    return max((TTLS.get(ttl, 0.0) for ttl in asked), default=0.0)


def continues(body: CountBody) -> bool:
    """Whether the answer goes on where the assistant's last message ends."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def _turns(message: MessageBody, path: str, *, past: bool, sees: bool) -> list[ChatTurn]:
    """Returns a part as text.  past: the assistant has answered it."""
    if isinstance(message.content, str):
        return [ChatTurn(message.role, message.content)]
    if message.role == "system":
        text = _system_text(message.content, path)
        return [ChatTurn("system", text)] if text else []
    blocks = [
        (block, f"{path}[{index}]")
        for index, block in enumerate(message.content)
        if block.type not in LEFT_OUT and (block.type == "tool_result" or not block.type.endswith(RESULT))
    ]
    return [_assistant(blocks)] if message.role == "assistant" else _users(blocks, past=past, sees=sees)


def _assistant(blocks: Sequence[tuple[BlockBody, str]]) -> ChatTurn:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, path in blocks:
        match block.type:
            case "thinking":
                thoughts.append(needed(block.thinking, f"{path}.thinking"))
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                name = needed(block.name, f"{path}.name")
                calls.append(ToolCall(needed(block.id, f"{path}.id"), name, arguments))
            case _:
                text.append(_block_text(block, path, past=True))
    return ChatTurn("assistant", "".join(text), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _users(blocks: Sequence[tuple[BlockBody, str]], *, past: bool, sees: bool) -> list[ChatTurn]:
    """Returns the turns of a user's message, which may be text, results of calls, or both: a result is a turn of its
    own."""
    turns: list[ChatTurn] = []
    for block, path in blocks:
        if block.type == "tool_result":
            content = _result(block.content, f"{path}.content", sees=sees)
            turns.append(content.turn("tool", tool_call_id=needed(block.tool_use_id, f"{path}.tool_use_id")))
        elif sees and block.type == "image":
            _add(turns, Content.of([_picture(block, path)]).turn("user"))
        else:
            _add(turns, ChatTurn("user", _block_text(block, path, past=past)))
    return turns


def _add(turns: list[ChatTurn], turn: ChatTurn) -> None:
    """Append a turn, or join it to one of the same speaker, as this API does: many templates want them to alternate."""
    if turns and turns[-1].role == turn.role == "user":
        turns[-1] = joined(turns[-1], turn)
    else:
        turns.append(turn)


def _result(content: str | Sequence[BlockBody] | dict[str, Any] | None, path: str, *, sees: bool) -> Content:
    """Returns the content of a tool's result: its text, and its pictures where the model sees."""
    if not sees or not isinstance(content, list):
        return Content(_nested_text(content, path, past=True))

    def pieces() -> Iterator[str | Picture]:
        for index, block in enumerate(content):
            at = f"{path}[{index}]"
            yield _picture(block, at) if block.type == "image" else _block_text(block, at, past=True)

    return Content.of(pieces(), between="\n")


def _picture(block: BlockBody, path: str) -> Picture:
    """Returns the picture of an image block.  Raises RequestError for a source that is none of the known ones."""
    match block.source:
        case BlockSource(type="base64", data=str(data)) as source:
            return GivenPicture.of("base64", data, f"{path}.source.data", media_type=source.media_type or "")
        case BlockSource(type="url", url=str(url)):
            return read_address(url, f"{path}.source.url")
        case BlockSource(type="file", file_id=str(file_id)):
            return GivenPicture.of("file", file_id, f"{path}.source.file_id")
    raise FieldError(f"{path}.source", "must be of type 'base64' with data, 'url' with url, or 'file' with file_id")


def _nested_text(content: str | Sequence[BlockBody] | dict[str, Any] | None, path: str, *, past: bool) -> str:
    """Returns the text of blocks within a block, a line each.  Raises RequestError for an object."""
    if isinstance(content, dict):
        raise FieldError(path, "must be text or a list of blocks")
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(_block_text(block, f"{path}[{index}]", past=past) for index, block in enumerate(content))


def _block_text(block: BlockBody, path: str, *, past: bool = False) -> str:
    """Returns the text of a block.  Raises RequestError for one that has none, but for images and such in the past."""
    source = block.source if isinstance(block.source, BlockSource) else None
    match block.type:
        case "text":
            return needed(block.text, f"{path}.text")
        case "tool_reference":
            return needed(block.tool_name, f"{path}.tool_name")
        case "compaction":
            return _nested_text(block.content, f"{path}.content", past=past)
        case "search_result":
            text = _nested_text(block.content, f"{path}.content", past=past)
            return _titled(text, block.title, block.source if isinstance(block.source, str) else None)
        case "document" if source is not None and source.type == "text":
            return _titled(needed(source.data, f"{path}.source.data"), block.title, block.context)
        case "document" if source is not None and source.type == "content":
            text = _nested_text(source.content, f"{path}.source.content", past=past)
            return _titled(text, block.title, block.context)
    if past and (told := left_out_note(block.type)):
        return told
    raise FieldError(
        f"{path}.type",
        f"'{block.type[:40]}' is not served here: models read and write text alone, no images, and documents as text",
        code="unsupported_content",
    )


def _titled(text: str, *above: str | None) -> str:
    return "\n".join([*filter(None, above), text])
