"""Input items as turns of a conversation.

Owns: which items belong to one turn.  Does not know: chat templates, answers.
"""

from collections.abc import Sequence

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import ChatTurn
from server.extensions.responses.requests import InputItem
from server.extensions.responses.tools import earlier_call
from server.openai.content import Content
from server.openai.conversation import ROLES, needed, num_answered, read_call, read_parts
from server.openai.requests import CallBody, CalledFunction, ContentPart

CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"})
OUTPUT = "_output"
ANSWERED = CALLS | {"reasoning"}  # what the assistant has sent, beside messages
# Of tools that ran elsewhere, and what no other server can read.
LEFT_OUT = frozenset({
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call",
    "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "tool_search_call", "tool_search_output", "compaction",
})  # fmt: skip
REASONING_TYPES = frozenset({"reasoning_text", "summary_text"})


def read_input(
    given: str | Sequence[InputItem], instructions: str | None, *, sees: bool = False
) -> tuple[ChatTurn, ...]:
    """Returns the conversation in the engine's terms.  sees: the model reads pictures.  Raises RequestError."""
    turns: list[ChatTurn] = [ChatTurn("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*turns, ChatTurn("user", given))
    if not given:
        raise FieldError("input", "an empty list; expected at least one item")
    answered = num_answered(["assistant" if item.type in ANSWERED else item.role for item in given])
    for index, item in enumerate(given):
        _add(turns, item, f"input[{index}]", past=index < answered, sees=sees)
    if not turns:
        raise FieldError("input", "holds nothing that this server can read")
    return tuple(turns)


def _add(turns: list[ChatTurn], item: InputItem, path: str, *, past: bool, sees: bool) -> None:
    """Returns a part as text.  past: the assistant has answered it."""
    match item.type:
        case "message" | None:
            _add_message(turns, item, path, past=past, sees=sees)
        case "reasoning":
            turns.append(ChatTurn("assistant", "", reasoning=_thoughts(item)))
        case kind if kind in CALLS:
            function = CalledFunction(*earlier_call(item, path))
            call = read_call(CallBody(function, id=item.call_id or item.id or ""), f"{path}.arguments")
            before = _assistant(turns)
            turns[-1] = msgspec.structs.replace(before, tool_calls=(*before.tool_calls, call))
        case kind if kind.removesuffix(OUTPUT) in CALLS:
            call_id = needed(item.call_id or item.id, f"{path}.call_id")
            turns.append(_output(item, f"{path}.output", sees=sees).turn("tool", tool_call_id=call_id))
        case kind if kind not in LEFT_OUT:
            raise _unknown(kind, path)


def _add_message(turns: list[ChatTurn], item: InputItem, path: str, *, past: bool, sees: bool) -> None:
    role = ROLES.get(needed(item.role, f"{path}.role"))
    if role is None or role == "tool":
        raise FieldError(f"{path}.role", "must be system, developer, user or assistant")
    turn = _content(item.content, f"{path}.content", past=past, sees=sees).turn(role)
    if role == "assistant" and turns and turns[-1].reasoning and not turns[-1].content:
        turns[-1] = msgspec.structs.replace(turn, reasoning=turns[-1].reasoning)
    else:
        turns.append(turn)


def _assistant(turns: list[ChatTurn]) -> ChatTurn:
    """Returns the assistant's turn that a call belongs to; calls in a row are one turn."""
    if not turns or turns[-1].role != "assistant":
        turns.append(ChatTurn("assistant", ""))
    return turns[-1]


def _content(content: str | list[ContentPart] | None, path: str, *, past: bool, sees: bool) -> Content:
    if not isinstance(content, list):
        return Content(needed(content, path))
    return read_parts(content, path, past=past, sees=sees)


def _output(item: InputItem, path: str, *, sees: bool) -> Content:
    """Returns what a call gave; what a shell gave stays JSON, with streams and exit codes."""
    if isinstance(item.output, str):
        return Content(item.output)
    if item.type == "apply_patch_call_output":
        return Content(needed(item.status, path))
    if not isinstance(item.output, list):
        raise FieldError(path, "required, as text or a list of parts")
    if item.type == "shell_call_output":
        return Content(msgspec.json.encode(item.output).decode())
    try:
        parts = msgspec.convert(item.output, list[ContentPart])
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise FieldError(path + where.rstrip("`"), reason.replace("`", "")) from None
    return read_parts(parts, path, past=True, sees=sees)


def _unknown(kind: str, path: str) -> FieldError:
    reason = "only messages, calls of tools, their outputs and reasoning are supported"
    if kind == "item_reference":
        reason = "no items are kept to be referred to; send the item itself, or previous_response_id where it is stored"
    return FieldError(f"{path}.type", reason, code="unsupported_content")


def _thoughts(item: InputItem) -> str:
    parts = item.content if isinstance(item.content, list) else []
    return "".join(part.text or "" for part in parts if part.type in REASONING_TYPES)
