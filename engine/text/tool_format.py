"""How a model writes function calls: which format, what it is told about it, and the grammar that demands it.

Owns: the two formats and how to tell which one a chat template means.  Does not know: parsing, requests.

'hermes' (also Qwen):  <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, as often as there are calls
'llama3':              {"name": "f", "parameters": {...}}, several joined by "; "
"""

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from engine.params import Grammar

ToolFormat = Literal["hermes", "llama3"]

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"  # Llama may begin its calls with it

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
    """One way to write a call: what comes before the arguments, their schema, what comes after."""

    begin: str
    schema: dict[str, Any]
    end: str


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


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template asks the model for; 'hermes' if it asks for none."""
    if CALL_OPEN in template:
        return "hermes"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else "hermes"


def explains_tools(template: str) -> bool:
    """Whether a chat template tells the model which functions there are."""
    return "tools" in template


def explanation(tools: Sequence[object]) -> str:
    """A system message that tells a model which functions there are, for templates that do not."""
    return _EXPLANATION.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))


def demand_calls(tools: Sequence[Tool], form: ToolFormat, *, many: bool) -> Grammar:
    """The grammar of an output that is a call of one of ``tools``, or several if ``many``."""
    return _grammar(CallsShape([_call_shape(tool, form) for tool in tools], _separator(form), many))


def allow_calls(tools: Sequence[Tool], form: ToolFormat, answer: Grammar | None, *, many: bool) -> Grammar:
    """The grammar of an output that is free to call, and whose calls are as ``tools`` say.

    answer: what it must be if it does not call; None for any text, which in the hermes format may stand beside calls.
    No output is read as a call that is none.
    """
    calls = [_call_shape(tool, form) for tool in tools]
    kind, source = ("text", "") if answer is None else (answer.kind, answer.source)
    if form == "llama3":
        begun = "|".join(re.escape(one) for one in (PYTHON_TAG, *(call_start(tool.name) for tool in tools)))
        otherwise = Otherwise(kind, source, not_begun=f"{SPACE}({begun})")
        return _grammar(CallsShape(calls, _separator(form), many, PYTHON_TAG, otherwise))
    if answer is None:
        otherwise = Otherwise(kind, source, opening=CALL_OPEN)
    else:
        # What would be read as a call wherever it stands.  In a string of JSON the quotation mark is escaped.
        otherwise = Otherwise(kind, source, not_begun=rf'(?s:.*){CALL_OPEN}{SPACE}\{{[\s,]*"')
    return _grammar(CallsShape(calls, _separator(form), many, otherwise=otherwise))


def call_start(name: str) -> str:
    """The text that begins a call of a function in the llama3 format where a grammar holds.

    An output that begins so can only go on as a call, and no other one is read as one."""
    return f'{{"name": {msgspec.json.encode(name).decode()}'


def _grammar(shape: CallsShape) -> Grammar:
    return Grammar("tool_calls", msgspec.json.encode(shape).decode())


def _separator(form: ToolFormat) -> str:
    return "\n" if form == "hermes" else "; "


def _call_shape(tool: Tool, form: ToolFormat) -> CallShape:
    if form == "hermes":
        name = msgspec.json.encode(tool.name).decode()
        return CallShape(f'{CALL_OPEN}\n{{"name": {name}, "arguments": ', tool.parameters, f"}}\n{CALL_CLOSE}")
    return CallShape(f'{call_start(tool.name)}, "parameters": ', tool.parameters, "}")
