"""Tools of a response as functions: which name the model calls each by, and its calls as its clients expect them.

Owns: kinds of tools, names of those in namespaces, what is left out.  Does not know: how calls are written or parsed.
A call of an earlier turn becomes what the model has written, whichever model made it.
"""

import shlex
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from engine.text.tool_calls import ToolFormat
from engine.types.errors import FieldError
from server.extensions.responses.objects import (
    AnyCallItem,
    CallItem,
    CustomCallItem,
    ExecAction,
    LocalShellCallItem,
    PatchCallItem,
    PatchOperation,
    ShellAction,
    ShellCallItem,
    Status,
)
from server.extensions.responses.requests import FlatToolChoice, InputItem, MemberTool, ResponsesBody
from server.openai.conversation import ToolRequest, needed, read_tools, warn_left_out
from server.openai.requests import MAX_TOOLS, FunctionBody, FunctionChoice, ToolBody, ToolChoice

# Beginnings of types.
NOT_RUN: Final = (
    "web_search", "image_generation", "tool_search", "code_interpreter", "file_search", "computer", "mcp",
    "programmatic_tool_calling",
)  # fmt: skip
SHELL: Final = ("bash", "-lc")


def _strings(**properties: dict[str, Any]) -> dict[str, Any]:
    told = {name: {"type": "string", **more} for name, more in properties.items()}
    return {"type": "object", "properties": told, "required": [*told]}


CUSTOM: Final = _strings(input={"description": "What the tool takes, as it is."})
COMMAND: Final = _strings(command={"description": "The command."})
PATCHES: Final = ("create_file", "update_file", "delete_file")
# Tools that a client runs, by their type -> what the model sees of them.
RUN_BY_CLIENT: Final = {
    "local_shell": FunctionBody("local_shell", "Run a command in a shell.", COMMAND),
    "shell": FunctionBody("shell", "Run a command in a shell.", COMMAND),
    "apply_patch": FunctionBody(
        "apply_patch",
        "Create, update or delete a file.",
        _strings(
            type={"enum": [*PATCHES]},
            path={"description": "Of the file."},
            diff={"description": "In the V4A format; empty where a file is deleted."},
        ),
    ),
}
KINDS: Final = ("function", "custom", *RUN_BY_CLIENT)


class Callee(NamedTuple):
    """A tool that the model may call.  kind: the tool's type.  function: as the model sees it, with its name there."""

    kind: str
    name: str
    namespace: str | None
    function: FunctionBody


def function_named(name: str) -> Callee:
    """Returns a function of which nothing but its name is known: a parser may find calls of others than it was
    given."""
    return Callee("function", name, None, FunctionBody(name))


def flat_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model calls a tool of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def callees(body: ResponsesBody) -> dict[str, Callee]:
    """Returns the tools that can be called, by the names that the model calls them by.  Raises RequestError."""
    found: dict[str, Callee] = {}
    for index, tool in enumerate(body.tools or ()):
        path = f"tools[{index}]"
        if left_out := next((kind for kind in NOT_RUN if tool.type.startswith(kind)), None):
            warn_left_out(left_out)
            continue
        is_space = tool.type == "namespace"
        namespace = needed(tool.name, f"{path}.name") if is_space else None
        members = [(one, f"{path}.tools[{number}]") for number, one in enumerate(tool.tools or ())]
        for member, where in members if is_space else [(tool, path)]:
            callee = _callee(member, namespace, where)
            if callee.function.name in found:
                raise FieldError("tools", f"two of them have the same name, {callee.function.name}")
            found[callee.function.name] = callee
    if len(found) > MAX_TOOLS:
        raise FieldError("tools", f"{len(found)} with those in namespaces; at most {MAX_TOOLS} are taken")
    return found


def _callee(tool: MemberTool, namespace: str | None, path: str) -> Callee:
    if tool.type in RUN_BY_CLIENT and namespace is None:
        return Callee(tool.type, tool.type, None, RUN_BY_CLIENT[tool.type])
    if tool.type not in ("function", "custom"):
        known = "function and custom" if namespace else f"{', '.join(KINDS)} and namespace"
        raise FieldError(
            f"{path}.type", f"'{tool.type[:40]}' is not known; there are {known}", code="unsupported_parameter"
        )
    name = needed(tool.name, f"{path}.name")
    flat = flat_name(namespace, name)
    if tool.type == "function":
        return Callee("function", name, namespace, FunctionBody(flat, tool.description, tool.parameters, tool.strict))
    told = [tool.description] if tool.description else []
    if tool.format is not None and tool.format.definition:
        told.append(f"The input has the form of this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return Callee("custom", name, namespace, FunctionBody(flat, "\n\n".join(told) or None, CUSTOM))


def read_response_tools(body: ResponsesBody, form: ToolFormat) -> ToolRequest:
    """Returns the functions that may be called.  Raises RequestError."""
    known = callees(body)
    choice = body.tool_choice
    wanted: str | ToolChoice | None
    if not isinstance(choice, FlatToolChoice):
        wanted = choice
    elif choice.type == "allowed_tools":
        allowed = {name for one in choice.tools or () for name in _chosen(known, one)}
        known = {name: one for name, one in known.items() if name in allowed}
        if not known:
            raise FieldError("tool_choice.tools", "none of the tools that can be called is among them")
        wanted = choice.mode or "auto"
    else:
        name = next(iter(_chosen(known, choice)), None)
        if name is None:
            raise FieldError("tool_choice", "none of the tools that can be called has this type and name")
        wanted = ToolChoice("function", FunctionChoice(name))
    functions = [ToolBody("function", one.function) for one in known.values()]
    return read_tools(functions, wanted, parallel=body.parallel_tool_calls, form=form)


def _chosen(known: Mapping[str, Callee], choice: MemberTool | FlatToolChoice) -> list[str]:
    """Returns the names of the tools that a choice means: one, or all of a namespace."""
    if choice.type == "namespace":
        return [name for name, one in known.items() if one.namespace == choice.name]
    wanted = choice.type if choice.type in RUN_BY_CLIENT else choice.name
    return [name for name, one in known.items() if one.kind == choice.type and wanted in (name, one.name)]


# ---- calls ----------------------------------------------------------------------------------


def call_item(callee: Callee, identity: str, arguments: str, status: Status) -> AnyCallItem:
    """Returns a call as the clients of its tool read it.  arguments: as the model has written them so far.

    A whole call in which no command or change of a file can be found is incomplete."""
    call_id = f"call_{identity[:24]}"
    namespace = callee.namespace or UNSET
    given = {} if callee.kind == "function" else _decoded(arguments)
    match callee.kind:
        case "custom":
            text = given.get("input", _only(given))
            if not isinstance(text, str):
                text = arguments if status == "completed" else ""
            return CustomCallItem(
                id=f"ctc_{identity}", call_id=call_id, name=callee.name, namespace=namespace, input=text, status=status
            )
        case "local_shell":
            lines = _lines(given)
            action = ExecAction(command=[*SHELL, "\n".join(lines)])
            status = _checked(status, is_whole=any(lines))
            return LocalShellCallItem(id=f"lsh_{identity}", call_id=call_id, action=action, status=status)
        case "shell":
            lines = _lines(given)
            status = _checked(status, is_whole=any(lines))
            return ShellCallItem(
                id=f"sh_{identity}", call_id=call_id, action=ShellAction(commands=lines or [""]), status=status
            )
        case "apply_patch":
            operation, is_whole = _operation(given)
            status = _checked(status, is_whole=is_whole)
            return PatchCallItem(id=f"apc_{identity}", call_id=call_id, operation=operation, status=status)
    return CallItem(
        id=f"fc_{identity}",
        call_id=call_id,
        name=callee.name,
        namespace=namespace,
        arguments=arguments,
        status=status,
    )


def _checked(status: Status, *, is_whole: bool) -> Status:
    return status if is_whole or status != "completed" else "incomplete"


def _decoded(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments by name; none of a call that was cut off, or whose arguments have no names."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _only(given: Mapping[str, Any]) -> Any:
    """Returns the value of an only argument, which models call by many names."""
    return next(iter(given.values())) if len(given) == 1 else None


def _lines(given: Mapping[str, Any]) -> list[str]:
    """Returns the command lines among a call's arguments: one as text or as its words, or several."""
    words = _texts(given.get("command"))
    if words:
        is_shell = len(words) == 3 and words[1] in ("-c", "-lc")
        return [words[2] if is_shell else shlex.join(words)]
    line = given.get("command") or given.get("commands") or _only(given)
    return [line] if isinstance(line, str) else _texts(given.get("commands"))


def _operation(given: Mapping[str, Any]) -> tuple[PatchOperation, bool]:
    """Returns what becomes of a file, as far as it can be read, and whether it can be done."""
    named = given.get("operation")
    fields = named if isinstance(named, dict) else given
    kind, path, diff = fields.get("type"), fields.get("path"), fields.get("diff")
    text = diff if isinstance(diff, str) else "\n".join(_texts(diff))
    is_whole = kind in PATCHES and isinstance(path, str) and path != "" and bool(text or kind != "update_file")
    return PatchOperation(
        type=kind if kind in PATCHES else "update_file", path=path if isinstance(path, str) else "", diff=text
    ), is_whole


def earlier_call(item: InputItem, path: str) -> tuple[str, str | dict[str, Any] | None]:
    """Returns (name, arguments) of a call, as the model has written it or would have.  Raises RequestError."""
    match item.type:
        case "custom_tool_call":
            return flat_name(item.namespace, needed(item.name, f"{path}.name")), {
                "input": needed(item.input, f"{path}.input")
            }
        case "local_shell_call" | "shell_call":
            return item.type.removesuffix("_call"), {"command": "\n".join(_lines(item.action or {}))}
        case "apply_patch_call":
            return "apply_patch", item.operation or {}
    return flat_name(item.namespace, needed(item.name, f"{path}.name")), item.arguments


def _texts(given: object) -> list[str]:
    """Returns a list's members as text; nothing of what is no list of texts and numbers."""
    if isinstance(given, list) and all(isinstance(one, str | int | float) for one in given):
        return [str(one) for one in given]
    return []
