"""What a model is told about functions, and the grammar that demands calls of them.

Owns: how such a grammar is described.  Does not know: any model's own format, parsing, requests.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.types.params import Grammar

SPACE: Final = r"[\s\x1c-\x1f]*"  # an expression for what ``str.lstrip`` takes away

_EXPLANATION: Final = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with its name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called.  parameters: JSON Schema of its arguments."""

    name: str
    parameters: dict[str, Any]


class CallShape(msgspec.Struct, frozen=True):
    """One way to write a call: what comes before the arguments, their schema, what comes after.

    name: of the function, for messages."""

    begin: str
    schema: dict[str, Any]
    end: str
    name: str = ""


class Otherwise(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output may be that is no call.

    kind, source: of a grammar, or 'text' for free text.  opening: where it stands in free text, a call begins; empty
    if calls are the whole output.  not_begun: an expression that matches how it may not begin then; empty for any way.
    """

    kind: str
    source: str = ""
    opening: str = ""
    not_begun: str = ""


class CallsShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of a grammar of kind 'tool_calls': one or several of ``calls``, joined by ``separator``.

    tag: may stand in front of them all.  otherwise: None if there must be a call."""

    calls: list[CallShape]
    separator: str
    many: bool
    tag: str = ""
    otherwise: Otherwise | None = None


class TagsShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of a grammar of kind 'structural_tag': free text, in which a trigger begins one of the tags.

    triggers: every tag's ``begin`` starts with one.  at_least_one: there must be a tag.  stop_after_first: which ends
    the output."""

    triggers: list[str]
    tags: list[CallShape]
    at_least_one: bool = False
    stop_after_first: bool = False


def explains_tools(template: str) -> bool:
    """Whether a chat template tells the model which functions there are."""
    return "tools" in template


def explanation(tools: Sequence[object]) -> str:
    """A system message that tells a model which functions there are, for templates that do not."""
    return _EXPLANATION.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))


def shaped_calls(
    calls: Sequence[CallShape], separator: str, *, many: bool, tag: str = "", otherwise: Otherwise | None = None
) -> Grammar:
    """The grammar of an output that is calls, or what ``otherwise`` says; see ``CallsShape``."""
    return Grammar("tool_calls", msgspec.json.encode(CallsShape(list(calls), separator, many, tag, otherwise)).decode())


def marked_calls(
    calls: Sequence[CallShape],
    opening: str,
    answer: Grammar | None,
    *,
    many: bool,
    forced: bool,
    separator: str = "",
    called: str = "",
) -> Grammar:
    """The grammar of calls that each begin with the marker ``opening``, which stands nowhere else.

    answer, many, forced: as ``ToolFormat.grammar`` has them.
    called: an expression for what is read as a call, if that is not every marker."""
    if forced:
        otherwise = None
    elif answer is None:
        otherwise = Otherwise("text", opening=opening)
    else:
        not_begun = rf"(?s:.*){called or re.escape(opening)}"
        otherwise = Otherwise(answer.kind, answer.source, not_begun=not_begun)
    return shaped_calls(calls, separator, many=many, otherwise=otherwise)


def json_name(name: str) -> str:
    """A function's name as a JSON string."""
    return msgspec.json.encode(name).decode()


def properties(tool: Tool) -> dict[str, object]:
    """The schemas of a function's arguments by their names; empty where the schema is no plain list of them."""
    given = tool.parameters.get("properties")
    return given if isinstance(given, dict) else {}
