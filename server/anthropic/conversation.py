"""Messages made of blocks as turns of a conversation, and tools as a chat template is told of them.

Owns: which blocks belong to one turn, what is refused.  Does not know: chat templates, answers.
"""

from collections.abc import Sequence

import msgspec

from engine.errors import FieldError
from engine.prompt import ChatTurn, ToolCall
from engine.text.tool_calls import ToolFormat
from server.anthropic.requests import BlockBody, CountBody, MessageBody, MessageTool, MessageToolChoice
from server.openai.conversation import Choice, ToolRequest, needed, read_tools
from server.openai.requests import FunctionBody, FunctionChoice, ToolBody, ToolChoice

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_conversation(body: CountBody) -> tuple[ChatTurn, ...]:
    """Returns the conversation in the engine's terms.  Raises RequestError."""
    if not body.messages:
        raise FieldError("messages", "an empty list; expected at least one message")
    turns: list[ChatTurn] = []
    if body.system:
        turns.append(ChatTurn("system", read_text(body.system, "system")))
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}].content"):
            _add(turns, turn)
    return tuple(turns)


def read_text(content: str | Sequence[BlockBody], path: str) -> str:
    """Returns the text of blocks, a line each.  Raises RequestError for any other block."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{path}[{index}]") for index, block in enumerate(content))


def continues(body: CountBody) -> bool:
    """Whether the answer goes on where the assistant's last message ends."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def read_message_tools(
    tools: Sequence[MessageTool] | None, choice: MessageToolChoice | None, form: ToolFormat
) -> ToolRequest:
    """Returns the functions that may be called.  Raises RequestError."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    wanted: Choice = None
    if choice is not None and choice.type == "tool":
        wanted = ToolChoice("function", FunctionChoice(needed(choice.name, "tool_choice.name")))
    elif choice is not None:
        wanted = CHOICES[choice.type]
    parallel = not (choice is not None and choice.disable_parallel_tool_use)
    return read_tools(functions, wanted, parallel=parallel, form=form)


def _function(tool: MessageTool, path: str) -> ToolBody:
    if tool.type not in (None, "custom"):
        raise FieldError(
            f"{path}.type",
            f"'{tool.type[:40]}' is not supported: this server runs no tools itself; give an input_schema instead",
            code="unsupported_parameter",
        )
    if tool.input_schema is None:
        raise FieldError(f"{path}.input_schema", "required, but not given")
    return ToolBody("function", FunctionBody(tool.name, tool.description, tool.input_schema, tool.strict))


def _turns(message: MessageBody, path: str) -> list[ChatTurn]:
    if isinstance(message.content, str):
        return [ChatTurn(message.role, message.content)]
    blocks = [(block, f"{path}[{index}]") for index, block in enumerate(message.content)]
    return [_assistant(blocks)] if message.role == "assistant" else _others(message.role, blocks)


def _assistant(blocks: Sequence[tuple[BlockBody, str]]) -> ChatTurn:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, path in blocks:
        match block.type:
            case "thinking":
                thoughts.append(needed(block.thinking, f"{path}.thinking"))
            case "redacted_thinking":
                pass  # only Anthropic can read it
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                name = needed(block.name, f"{path}.name")
                calls.append(ToolCall(needed(block.id, f"{path}.id"), name, arguments))
            case _:
                text.append(_block_text(block, path))
    return ChatTurn("assistant", "".join(text), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _others(role: str, blocks: Sequence[tuple[BlockBody, str]]) -> list[ChatTurn]:
    """What a user sends may be text, results of calls, or both: a result is a turn of its own."""
    turns: list[ChatTurn] = []
    for block, path in blocks:
        if block.type == "tool_result":
            text = read_text(block.content or "", f"{path}.content")
            turns.append(ChatTurn("tool", text, tool_call_id=needed(block.tool_use_id, f"{path}.tool_use_id")))
        else:
            _add(turns, ChatTurn(role, _block_text(block, path)))
    return turns


def _add(turns: list[ChatTurn], turn: ChatTurn) -> None:
    """Append a turn, or join it to one of the same speaker, as this API does: many templates want them to alternate."""
    if turns and turns[-1].role == turn.role == "user":
        turns[-1] = msgspec.structs.replace(turns[-1], content=f"{turns[-1].content}\n{turn.content}")
    else:
        turns.append(turn)


def _block_text(block: BlockBody, path: str) -> str:
    if block.type != "text":
        raise FieldError(
            f"{path}.type",
            f"'{block.type[:40]}' is not served here: models read and write text alone, no images or documents",
            code="unsupported_content",
        )
    return needed(block.text, f"{path}.text")
