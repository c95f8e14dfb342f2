"""The explanation of functions to a model, and the grammar that requires calls of them.

Owns: how such a grammar is described.  Does not know: any model's own format, parsing, requests.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.types.params import Grammar

SPACE: Final = r"[\s\x1c-\x1f]*"  # an expression for the white space that ``str.lstrip`` removes

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


class ValueShape(msgspec.Struct, frozen=True):
    """One way to write an argument that is not a part of a JSON object: the text before its value and after it.

    schema: of the value, which is JSON, but a string without quotes.  name: of the argument; empty for any name, which
    is then between ``begin`` and ``then``."""

    begin: str
    schema: Any
    end: str
    name: str = ""
    then: str = ""
    is_required: bool = False


class CallShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way to write a call: the text before the arguments, their schema, and the text after them.

    name: of the function, for messages.  values: the arguments in their order, if they are not one JSON object.
    between: text between two values; the strings among them have quotes then.
    then: texts of which one follows ``begin``; empty for none."""

    begin: str
    schema: dict[str, Any]
    end: str
    name: str = ""
    values: list[ValueShape] | None = None
    between: str = ""
    then: list[str] = []

    @property
    def begins(self) -> list[str]:
        """All texts that may come before the arguments."""
        return [self.begin + one for one in self.then or [""]]


class Otherwise(msgspec.Struct, frozen=True, omit_defaults=True):
    """The output that a grammar allows instead of calls.

    kind, source: of a grammar, or 'text' for free text.
    opening: marker in free text at which a call begins; empty if calls are the whole output.
    not_begun: expression for the beginnings that such an output must not have; empty for any.
    markers, quoting: other markers that free text may have; behind those of ``quoting``, up to the next marker,
    ``opening`` is text.
    """

    kind: str
    source: str = ""
    opening: str = ""
    not_begun: str = ""
    markers: list[str] = []
    quoting: list[str] = []


class CallsShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of a grammar of kind 'tool_calls': one or several of ``calls``, joined by ``separator``.

    tag: text that may come before them all.  around: the texts that must, before and after them.
    otherwise: None if there must be a call."""

    calls: list[CallShape]
    separator: str
    many: bool
    tag: str = ""
    otherwise: Otherwise | None = None
    around: tuple[str, str] = ("", "")


class TagsShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of a grammar of kind 'structural_tag': free text, in which a trigger begins one of the tags.

    triggers: every tag's ``begin`` starts with one.  at_least_one: whether there must be a tag.
    stop_after_first: whether the first tag ends the output."""

    triggers: list[str]
    tags: list[CallShape]
    at_least_one: bool = False
    stop_after_first: bool = False


def explains_tools(template: str) -> bool:
    """Return whether a chat template describes the available functions to the model."""
    return "tools" in template


def explanation(tools: Sequence[object]) -> str:
    """Return a system message that describes the functions to a model, for templates that do not."""
    return _EXPLANATION.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))


def shaped_calls(
    calls: Sequence[CallShape],
    separator: str,
    *,
    many: bool,
    tag: str = "",
    otherwise: Otherwise | None = None,
    around: tuple[str, str] = ("", ""),
) -> Grammar:
    """Return the grammar of an output that is calls, or what ``otherwise`` allows (``CallsShape``)."""
    shape = CallsShape(list(calls), separator, many, tag, otherwise, around)
    return Grammar("tool_calls", msgspec.json.encode(shape).decode())


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
    """Return the grammar of calls that each begin with the marker ``opening``, which is nowhere else.

    answer, many, forced: as in ``ToolFormat.grammar``.
    called: expression for text that is read as a call, if not every marker is."""
    if forced:
        otherwise = None
    elif answer is None:
        otherwise = Otherwise("text", opening=opening)
    else:
        not_begun = rf"(?s:.*){called or re.escape(opening)}"
        otherwise = Otherwise(answer.kind, answer.source, not_begun=not_begun)
    return shaped_calls(calls, separator, many=many, otherwise=otherwise)


def json_name(name: str) -> str:
    """Return a function's name as a JSON string."""
    return msgspec.json.encode(name).decode()


def written_values(tool: Tool, begin: str, then: str, end: str) -> list[ValueShape]:
    """Return the arguments of a function that are written one by one, with their names between ``begin`` and ``then``.

    A function that does not name its arguments takes any, as text."""
    required = tool.parameters.get("required")
    named = [
        ValueShape(
            f"{begin}{name}{then}", schema, end, name, is_required=isinstance(required, list) and name in required
        )
        for name, schema in properties(tool).items()
    ]
    return named or [ValueShape(begin, {}, end, then=then)]


def properties(tool: Tool) -> dict[str, object]:
    """Return the schemas of a function's arguments by name; empty if the schema has no plain table of them."""
    given = tool.parameters.get("properties")
    return given if isinstance(given, dict) else {}
