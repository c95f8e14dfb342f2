"""Input items as turns of a conversation.

Owns: which items belong to one turn.  Does not know: chat templates, answers.
"""

from collections.abc import Sequence

import msgspec

from engine.errors import FieldError
from engine.prompt import ChatTurn
from server.openai.conversation import ROLES, needed, num_answered, part_text, read_call
from server.openai.requests import CallBody, CalledFunction, ContentPart
from server.responses.requests import InputItem

ANSWERED = frozenset({"function_call", "reasoning"})  # what the assistant has sent, beside messages
REASONING_TYPES = frozenset({"reasoning_text", "summary_text"})


def read_input(given: str | Sequence[InputItem], instructions: str | None) -> tuple[ChatTurn, ...]:
    """Returns the conversation in the engine's terms.  Raises RequestError."""
    turns: list[ChatTurn] = [ChatTurn("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*turns, ChatTurn("user", given))
    if not given:
        raise FieldError("input", "an empty list; expected at least one item")
    answered = num_answered(["assistant" if item.type in ANSWERED else item.role for item in given])
    for index, item in enumerate(given):
        _add(turns, item, f"input[{index}]", past=index < answered)
    return tuple(turns)


def _add(turns: list[ChatTurn], item: InputItem, path: str, *, past: bool) -> None:
    """past: the assistant has answered it."""
    match item.type:
        case "message" | None:
            _add_message(turns, item, path, past=past)
        case "function_call":
            function = CalledFunction(needed(item.name, f"{path}.name"), item.arguments)
            call = read_call(CallBody(function, id=item.call_id or ""), f"{path}.arguments")
            before = _assistant(turns)
            turns[-1] = msgspec.structs.replace(before, tool_calls=(*before.tool_calls, call))
        case "function_call_output":
            output = _text(item.output, f"{path}.output", past=True)
            turns.append(ChatTurn("tool", output, tool_call_id=needed(item.call_id, f"{path}.call_id")))
        case "reasoning":
            turns.append(ChatTurn("assistant", "", reasoning=_thoughts(item)))
        case _:
            raise FieldError(
                f"{path}.type",
                "only messages, function calls, their outputs and reasoning are supported",
                code="unsupported_content",
            )


def _add_message(turns: list[ChatTurn], item: InputItem, path: str, *, past: bool) -> None:
    role = ROLES.get(needed(item.role, f"{path}.role"))
    if role is None or role == "tool":
        raise FieldError(f"{path}.role", "must be system, developer, user or assistant")
    text = _text(item.content, f"{path}.content", past=past)
    if role == "assistant" and turns and turns[-1].reasoning and not turns[-1].content:
        turns[-1] = msgspec.structs.replace(turns[-1], content=text)
    else:
        turns.append(ChatTurn(role, text))


def _assistant(turns: list[ChatTurn]) -> ChatTurn:
    """Returns the assistant's turn that a call belongs to; calls in a row are one turn."""
    if not turns or turns[-1].role != "assistant":
        turns.append(ChatTurn("assistant", ""))
    return turns[-1]


def _text(content: str | list[ContentPart] | None, path: str, *, past: bool) -> str:
    if not isinstance(content, list):
        return needed(content, path)
    return "".join(part_text(part, f"{path}[{index}]", past=past) for index, part in enumerate(content))


def _thoughts(item: InputItem) -> str:
    parts = item.content if isinstance(item.content, list) else []
    return "".join(part.text or "" for part in parts if part.type in REASONING_TYPES)
