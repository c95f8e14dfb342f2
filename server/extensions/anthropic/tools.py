"""Tools of Anthropic's API as functions: a client's own, those whose schema the API knows, and those it would run.

Owns: schemas of the client's tools that are named by type alone, and which tools cannot be run here.
Does not know: how calls are written, chat templates.
"""

from collections.abc import Sequence
from typing import Any, Final

from engine.text.tool_calls import ToolFormat
from engine.types.errors import FieldError
from server.extensions.anthropic.requests import MessageTool, MessageToolChoice
from server.openai.conversation import Choice, ToolRequest, needed, read_tools, warn_left_out
from server.openai.requests import FunctionBody, FunctionChoice, ToolBody, ToolChoice

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Beginnings of types; the last shows pictures of a screen.
NOT_RUN: Final = (
    "web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset", "computer",
)  # fmt: skip


def _schema(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


def _string(description: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "string", **({"description": description} if description else {}), **more}


_LINE: Final = {"type": "integer"}
_EDITS: Final = {
    "path": _string("Of the file or directory."),
    "view_range": {"type": "array", "items": _LINE, "description": "First and last line to view; -1 is the end."},
    "file_text": _string("What create writes."),
    "old_str": _string("What str_replace replaces; it stands in the file once."),
    "new_str": _string("What str_replace writes in its place."),
    "insert_line": {**_LINE, "description": "The line behind which insert writes; 0 is the beginning."},
    "insert_text": _string("What insert writes."),
}
# Beginning of the type -> what the tool does, and the schema that its client expects.
RUN_BY_CLIENT: Final = {
    "bash_": (
        "Run a command in a shell that keeps its state.",
        _schema("", command=_string("The command."), restart={"type": "boolean", "description": "Begin anew."}),
    ),
    "text_editor_": (
        "View, create and edit files.",
        _schema("command path", command=_string(enum=["view", "create", "str_replace", "insert"]), **_EDITS),
    ),
    "memory_": (
        "View, create, edit, delete and rename files below /memories, which are there in later conversations as well.",
        _schema(
            "command",
            command=_string(enum=["view", "create", "str_replace", "insert", "delete", "rename"]),
            **_EDITS,
            old_path=_string("What rename moves."),
            new_path=_string("Where rename moves it."),
        ),
    ),
}


def read_message_tools(
    tools: Sequence[MessageTool] | None, choice: MessageToolChoice | None, form: ToolFormat
) -> ToolRequest:
    """Returns the functions that may be called.  Raises RequestError."""
    read = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    functions = [ToolBody("function", function) for function in read if function is not None]
    wanted: Choice = None
    if choice is not None and choice.type == "tool":
        wanted = ToolChoice("function", FunctionChoice(needed(choice.name, "tool_choice.name")))
    elif choice is not None:
        wanted = CHOICES[choice.type]
    parallel = not (choice is not None and choice.disable_parallel_tool_use)
    return read_tools(functions, wanted, parallel=parallel, form=form)


def _function(tool: MessageTool, path: str) -> FunctionBody | None:
    """Returns a tool as a function; None for one that cannot be run here."""
    kind = tool.type or "custom"
    for beginning in NOT_RUN:
        if kind.startswith(beginning):
            warn_left_out(beginning)
            return None
    name = needed(tool.name, f"{path}.name")
    if kind == "custom":
        if tool.input_schema is None:
            raise FieldError(f"{path}.input_schema", "required, but not given")
        return FunctionBody(name, tool.description, tool.input_schema, tool.strict)
    for beginning, (description, schema) in RUN_BY_CLIENT.items():
        if kind.startswith(beginning):
            return FunctionBody(name, description, schema, tool.strict)
    known = ", ".join(["custom", *(one + "*" for one in RUN_BY_CLIENT)])
    raise FieldError(
        f"{path}.type",
        f"'{kind[:40]}' is not known; there are {known}, and custom with an input_schema is any function",
        code="unsupported_parameter",
    )
