"""Messages of Ollama's API as turns of a conversation.

Owns: which call a tool's answer belongs to, and where pictures stand.  Does not know: chat templates.
"""

from collections.abc import Sequence

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import ChatTurn, Picture, ToolCall
from server.extensions.ollama.requests import OllamaCallBody, OllamaTurn
from server.openai.content import GivenPicture
from server.openai.conversation import left_out_note, num_answered


def read_messages(messages: Sequence[OllamaTurn], *, sees: bool = False) -> tuple[ChatTurn, ...]:
    """Returns the conversation in the engine's terms.  sees: the model reads pictures.  Raises RequestError.

    This API gives calls no ids: a tool's answer belongs to the first call of its tool that has none yet."""
    answered = num_answered([message.role for message in messages])
    turns: list[ChatTurn] = []
    waiting: list[ToolCall] = []
    for index, message in enumerate(messages):
        content = message.content or ""
        pictures = read_images(message.images, f"messages[{index}].images") if sees else ()
        if message.images and not sees:
            if index >= answered:
                no_images(message.images, f"messages[{index}].images")
            content = "\n".join(filter(None, [content, left_out_note("image")]))
        calls = tuple(_call(call, f"call_{index}_{number}") for number, call in enumerate(message.tool_calls or ()))
        if calls and message.role != "assistant":
            raise FieldError(f"messages[{index}].tool_calls", "only the assistant calls functions")
        waiting += calls
        answers = _answered(message, waiting, f"messages[{index}]") if message.role == "tool" else ""
        turns.append(
            ChatTurn(
                message.role,
                content,
                reasoning=message.thinking or "",
                tool_calls=calls,
                tool_call_id=answers,
                name=message.tool_name or "",
                pictures=pictures,
                places=(0,) * len(pictures),
            )
        )
    return tuple(turns)


def read_images(images: Sequence[msgspec.Raw] | None, path: str) -> tuple[Picture, ...]:
    """Returns pictures, which stand before the text in this API.  Raises RequestError for what is not text."""
    pictures = []
    for index, image in enumerate(images or ()):
        try:
            given = msgspec.json.decode(image, type=str)
        except msgspec.MsgspecError:
            raise FieldError(f"{path}[{index}]", "must be base64, as text") from None
        pictures.append(GivenPicture.of("base64", given, f"{path}[{index}]"))
    return tuple(pictures)


def no_images(images: Sequence[msgspec.Raw] | None, path: str) -> None:
    """Raise RequestError if there are pictures."""
    if images:
        raise FieldError(
            path,
            f"{len(images)} of them; models read and write text alone here: leave pictures out",
            code="unsupported_content",
        )


def _call(call: OllamaCallBody, call_id: str) -> ToolCall:
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return ToolCall(call.id or call_id, call.function.name, arguments)


def _answered(message: OllamaTurn, waiting: list[ToolCall], path: str) -> str:
    """Take the call that a tool's message answers out of those that wait; returns its id.  Raises RequestError."""
    name, call_id = message.tool_name, message.tool_call_id
    for number, call in enumerate(waiting):
        if (call_id is None or call.call_id == call_id) and (name is None or call.name == name):
            del waiting[number]
            return call.call_id
    if call_id is not None:
        return call_id
    of = "" if name is None else f" of '{name[:100]}'"
    raise FieldError(path, f"no earlier call{of} waits for this answer; send the message that has its tool_calls")
