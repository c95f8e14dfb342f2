"""How the models of each built-in parser write calls and thoughts, and the kit over as many outputs as wanted.

python -m tests.plugins.model_outputs --outputs 10000
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.plugins.hookspecs import ParserContext
from engine.plugins.manager import BUILTIN
from engine.plugins.testing.parsers import Call, check_reasoning_parser, check_tool_parser
from engine.text.reasoning import ReasoningFormat
from engine.text.tool_calls import ToolFormat
from engine.text.tool_format import Tool
from engine.types.params import Grammar


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    bodies = [f'{{"name": "{name}", "arguments": {dumps(arguments)}}}' for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(calls: Sequence[Call]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_v3(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        given = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>")
    return "\n".join(written)


def glm4(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        given = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}\n{given}</tool_call>")
    return "\n".join(written)


class Subject(NamedTuple):
    plugin: str
    write: Callable[[Sequence[Call]], str]
    alone: bool = False
    escapes: bool = True


TOOL_PARSERS = [
    Subject("hermes", hermes),
    Subject("llama3_json", llama3, alone=True),
    Subject("pythonic", pythonic, alone=True),
    Subject("mistral", mistral),
    Subject("mistral", mistral_v3),
    Subject("deepseek_v3", deepseek_v3),
    Subject("deepseek_v3", deepseek_v31),
    Subject("kimi_k2", kimi_k2),
    Subject("harmony", harmony),
    Subject("qwen3_coder", qwen3_coder, escapes=False),
    Subject("glm4", glm4, escapes=False),
]
REASONING_PARSERS: dict[str, Callable[[str, str], str]] = {
    "think": lambda thoughts, answer: f"<think>\n{thoughts}\n</think>\n\n{answer}",
    "granite": lambda thoughts, answer: f"Here is my thought process: {thoughts} Here is my response: {answer}",
    "harmony": lambda thoughts, answer: (
        f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
    ),
}


def tool_format(name: str, template: str = "") -> ToolFormat:
    return importlib.import_module(BUILTIN[f"tool_parser.{name}"]).callboard_tool_parser(ParserContext(template))


def reasoning_format(name: str) -> ReasoningFormat:
    return importlib.import_module(BUILTIN[f"reasoning_parser.{name}"]).callboard_reasoning_parser(ParserContext())


def demand_calls(tools: Sequence[Tool], name: str, *, many: bool) -> Grammar:
    """The grammar of a built-in's calls where one must come."""
    return tool_format(name).grammar(tools, None, many=many, forced=True)


def allow_calls(tools: Sequence[Tool], name: str, answer: Grammar | None, *, many: bool) -> Grammar:
    """The same where none need come."""
    return tool_format(name).grammar(tools, answer, many=many, forced=False)


def check(subject: Subject, num_outputs: int, seed: int = 0) -> None:
    plugin, write, alone, escapes = subject
    check_tool_parser(
        lambda: tool_format(plugin), write, alone=alone, escapes=escapes, num_outputs=num_outputs, seed=seed
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--outputs", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="names with this in them")
    given = options.parse_args()
    for subject in TOOL_PARSERS:
        if given.only not in subject.write.__name__:
            continue
        start = time.monotonic()
        check(subject, given.outputs, given.seed)
        print(f"{subject.plugin} ({subject.write.__name__}): {time.monotonic() - start:.0f} s", flush=True)
    for name, write in REASONING_PARSERS.items():
        if given.only not in name:
            continue
        start = time.monotonic()
        check_reasoning_parser(
            lambda name=name: reasoning_format(name), write, num_outputs=given.outputs, seed=given.seed
        )
        print(f"reasoning {name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
