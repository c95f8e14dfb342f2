"""How a model writes function calls: which format, what it is told about it, and the grammar that demands it.

Owns: the two formats and how to tell which one a chat template means.  Does not know: parsing, requests.

'hermes' (also Qwen):  <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, as often as there are calls
'llama3':              {"name": "f", "parameters": {...}}, several joined by "; "
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from engine.sampling.params import Grammar

ToolFormat = Literal["hermes", "llama3"]

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"  # Llama may begin its calls with it

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


class CallsShape(msgspec.Struct, frozen=True):
    """The source of a grammar of kind 'tool_calls': one or several of ``calls``, joined by ``separator``."""

    calls: list[CallShape]
    separator: str
    many: bool


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
    shape = CallsShape(
        [_call_shape(tool, form) for tool in tools], separator="\n" if form == "hermes" else "; ", many=many
    )
    return Grammar("tool_calls", msgspec.json.encode(shape).decode())


def _call_shape(tool: Tool, form: ToolFormat) -> CallShape:
    name = msgspec.json.encode(tool.name).decode()
    if form == "hermes":
        return CallShape(f'{CALL_OPEN}\n{{"name": {name}, "arguments": ', tool.parameters, f"}}\n{CALL_CLOSE}")
    return CallShape(f'{{"name": {name}, "parameters": ', tool.parameters, "}")
