"""Every built-in parser by the kit that third parties get, what it reads of its own model, and how one is chosen."""

import json
from collections.abc import Callable, Sequence

import pytest

from engine.config import Config, build_config
from engine.plugins.manager import BUILTIN
from engine.plugins.parsers import plugin_formats
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.parsers import check_reasoning_parser, check_tool_parser
from engine.plugins.tool_parser.hermes import HermesFormat, HermesParser
from engine.text.call_reader import CallReader
from engine.text.reasoning import THINK, MarkedReasoning, ReasoningSplitter, Thinking
from engine.text.tool_calls import CallPiece, OutputPart, ToolCallParser, ToolFormat, ToolParser
from engine.text.tool_format import Tool
from engine.types.errors import PluginError
from tests.plugins.conftest import Install
from tests.plugins.model_outputs import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Subject,
    check,
    hermes,
    reasoning_format,
    tool_format,
)


@pytest.mark.parametrize("subject", TOOL_PARSERS, ids=lambda one: one.write.__name__)
def test_tool_parsers_conform(subject: Subject) -> None:
    check(subject, 25)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning_parsers_conform(name: str) -> None:
    check_reasoning_parser(lambda: reasoning_format(name), REASONING_PARSERS[name], num_outputs=25)


def test_every_built_in_is_proved() -> None:
    named = {f"tool_parser.{subject.plugin}" for subject in TOOL_PARSERS}
    named |= {f"reasoning_parser.{name}" for name in REASONING_PARSERS}
    assert named == {name for name in BUILTIN if name.split(".")[0] in ("tool_parser", "reasoning_parser")}


# ---- the kit finds planted mistakes ---------------------------------------------------------


class Wrapped(ToolFormat):
    """The hermes format with a parser that does something wrong."""

    markers = HermesFormat.markers

    def __init__(self, new_parser: Callable[[], ToolParser]) -> None:
        self._new_parser = new_parser

    def parser(self, tools: Sequence[Tool], *, exact: bool) -> ToolParser:
        return self._new_parser()


class Mutant:
    """Forwards to a right parser."""

    def __init__(self) -> None:
        self.right: CallReader = HermesParser()

    @property
    def cut_off(self) -> bool:
        return self.right.cut_off

    def push(self, text: str) -> list[OutputPart]:
        return self.right.push(text)

    def finish(self) -> list[OutputPart]:
        return self.right.finish()


class SearchesEveryPiece(Mutant):
    """Looks for the marker in each piece alone."""

    def push(self, text: str) -> list[OutputPart]:
        return self.right.push(text) if "<tool_call>" in text or self.right.num_calls else [text]


class LosesWhatIsHeldBack(Mutant):
    def finish(self) -> list[OutputPart]:
        self.right.finish()
        return []


class NeverSaysCutOff(Mutant):
    cut_off = False


class CountsFromOne(Mutant):
    def push(self, text: str) -> list[OutputPart]:
        return [
            part if isinstance(part, str) else CallPiece(part.index + 1, part.name, part.arguments)
            for part in self.right.push(text)
        ]


class NamesEveryPiece(Mutant):
    def push(self, text: str) -> list[OutputPart]:
        return [
            part if isinstance(part, str) else CallPiece(part.index, "f", part.arguments)
            for part in self.right.push(text)
        ]


class ShowsTheEndMarker(CallReader):
    """Forgets what stands behind a call."""

    def read(self):
        while (yield from self.text_until("<tool_call>")):
            self.begin("<tool_call>")
            if not (yield from self.named_object(strict=False)):
                if not self.told:
                    self.give_back()
                elif not (yield from self.skip("</tool_call>")):
                    self.cut_off = True


class EndsAtTheFirstMarker(CallReader):
    """Takes a marker in a string for the end of the call."""

    def read(self):
        while (yield from self.text_until("<tool_call>")):
            body = yield from self.value_until("</tool_call>")
            if body is None:
                return
            try:
                call = json.loads(body)
                self.call(call["name"])
                self.argue(json.dumps(call["arguments"]))
            except (ValueError, KeyError, TypeError):
                self.say(body)


class SplitsOnPieces(CallReader):
    """Takes what is pending for all there is."""

    def more(self):
        yield from ()
        return bool(self._pending)

    def read(self):
        yield from HermesParser.read(self)


SHARED = HermesParser()
MUTANTS = [
    SearchesEveryPiece, LosesWhatIsHeldBack, NeverSaysCutOff, CountsFromOne, NamesEveryPiece, ShowsTheEndMarker,
    EndsAtTheFirstMarker, SplitsOnPieces, lambda: SHARED,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.__name__)
def test_a_wrong_tool_parser_is_found(mutant: Callable[[], ToolParser]) -> None:
    with pytest.raises(ConformanceError):
        check_tool_parser(lambda: Wrapped(mutant), hermes, num_outputs=12)


class HoldsNothing(ReasoningSplitter):
    """Tells all it has, though a marker may have begun."""

    def push(self, text: str) -> tuple[str, str]:
        first, rest = super().push(text), super().finish()
        return first[0] + rest[0], first[1] + rest[1]


class KeepsThinking(ReasoningSplitter):
    def push(self, text: str) -> tuple[str, str]:
        return "".join(super().push(text)), ""


@pytest.mark.parametrize("mutant", [HoldsNothing, KeepsThinking])
def test_a_wrong_reasoning_parser_is_found(mutant: type[ReasoningSplitter]) -> None:
    class Format(MarkedReasoning):
        def parser(self, thinking: Thinking) -> ReasoningSplitter:
            return mutant(thinking)

    with pytest.raises(ConformanceError):
        check_reasoning_parser(lambda: Format(["<think>"], ["</think>"]), REASONING_PARSERS["think"], num_outputs=20)


# ---- what each model writes -----------------------------------------------------------------

WEATHER = Tool("get_weather", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})


@pytest.mark.parametrize(
    "name, output, text, calls",
    [
        ("mistral", '[TOOL_CALLS]f[CALL_ID]9xYz[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}', "", [("f", '{"x": 1}'), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS] none of it", "[TOOL_CALLS] none of it", []),
        ("deepseek_v3", "<｜tool▁call▁begin｜>no separator", "<｜tool▁call▁begin｜>no separator", []),
        ("kimi_k2", 'Ok.<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}', "Ok.", [("f", "{}")]),
        ("harmony", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "",
         [("f", '{"x": 1}')]),
        ("harmony", "<|channel|>final<|message|>hi", "<|channel|>final<|message|>hi", []),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n"
         "</parameter>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>", "",
         [("get_weather", '{"city": "12", "days": 3, "flag": true}')]),
        ("qwen3_coder", "Go:\n<function=get_weather>\n</function>", "Go:\n", [("get_weather", "{}")]),
        ("qwen3_coder", "<tool_call>\nno function", "<tool_call>\nno function", []),
        ("glm4", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln\n</arg_value><arg_key>days</arg_key>"
         "<arg_value>many</arg_value></tool_call>", "",
         [("get_weather", '{"city": "Köln\\n", "days": "many"}')]),
        ("pythonic", "<|python_start|>[get_weather(city='K\\'ö', days=[1, (2,)])]<|python_end|>", "",
         [("get_weather", '{"city": "K\'ö", "days": [1, [2]]}')]),
        ("pythonic", "[1] is a footnote, not_known(x)", "[1] is a footnote, not_known(x)", []),
    ],
)  # fmt: skip
def test_what_models_write(name: str, output: str, text: str, calls: list[tuple[str, str]]) -> None:
    parser = ToolCallParser(tool_format(name).parser([WEATHER, Tool("f", {}), Tool("g", {})], exact=False))
    parts = [*parser.push(output), *parser.finish()]
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallPiece):
            found = [*found, (part.name, "")] if part.name is not None else found
            found[-1] = (found[-1][0], found[-1][1] + part.arguments)
    assert ("".join(part for part in parts if isinstance(part, str)), found) == (text, calls)
    assert not parser.cut_off


def test_a_string_is_told_while_it_is_written() -> None:
    parser = tool_format("qwen3_coder").parser([WEATHER], exact=False)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push("a long") == [CallPiece(0, None, "a long")]
    assert parser.push(' "way\n') == [CallPiece(0, None, ' \\"way')]


def test_an_argument_that_python_cannot_read_cuts_the_call_off() -> None:
    parser = tool_format("pythonic").parser([WEATHER], exact=False)
    parts = [*parser.push("[get_weather(city=Berlin, days=1)]"), *parser.finish()]
    assert (parts, parser.cut_off) == ([CallPiece(0, "get_weather", ""), CallPiece(0, None, "{")], True)


@pytest.mark.parametrize(
    "output, thoughts, answer",
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes", "hm", "yes"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         "<|constrain|>json<|message|>{}<|call|>", "hm",
         "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
        ("<|channel|>commentary<|message|>First I look.<|end|>", "", "First I look."),
        ('{"plain": 1}', "", '{"plain": 1}'),
        ("<|channel|>analysis<|message|>cut o", "cut o", ""),
        ("<|channel|>ana", "", ""),
    ],
)  # fmt: skip
def test_messages_of_harmony(output: str, thoughts: str, answer: str) -> None:
    parser = reasoning_format("harmony").parser("optional")
    assert tuple(map("".join, zip(parser.push(output), parser.finish(), strict=True))) == (thoughts, answer)


@pytest.mark.parametrize(
    "continued, thinking",
    [("<think>a b", "open"), ("<think>a</think> b", "none"), ("b", "none"), ("", "optional"), ("a</think>", "none")],
)
def test_a_message_that_goes_on_may_be_in_the_middle_of_a_thought(continued: str, thinking: Thinking) -> None:
    prompt = "<user>What does <think> mean?<assistant>"
    assert THINK.thinking_at_end(prompt + continued, continued) == thinking


# ---- choosing -------------------------------------------------------------------------------

TEMPLATES = [
    ("<|start|>assistant<|channel|>analysis", "harmony", "harmony"),
    ("<think></think><|tool_call_begin|>", "kimi_k2", "think"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3", "none"),
    ("[TOOL_CALLS]", "mistral", "none"),
    ("<tool_call>{name}<arg_key></think>", "glm4", "think"),
    ("<tool_call>\n<function=", "qwen3_coder", "none"),
    ("<tools></tools> <tool_call>", "hermes", "none"),
    ("[func_name1(params_name1=params_value1)]", "pythonic", "none"),
    ('{"name": function name, "parameters": dictionary}', "llama3_json", "none"),
    ("Here is my thought process:", "hermes", "granite"),
    ("{{ messages }}", "hermes", "none"),
    ("", "hermes", "none"),
]


@pytest.mark.parametrize("template, tools, reasoning", TEMPLATES)
def test_the_template_says_which_parser(
    template: str, tools: str, reasoning: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    formats = plugin_formats(Config())(template)
    assert (formats.tool_parser, formats.reasoning_parser) == (tools, reasoning)
    assert any(message.startswith(f"plugin: tool_parser.{tools} (auto: ") for message in caplog.messages)
    assert (formats.reasoning is None) == (reasoning == "none")


def configured(**plugins: object) -> Config:
    return build_config(Config(), {"plugins": plugins})


def test_a_setting_overrides_the_template() -> None:
    formats = plugin_formats(configured(tool_parser="mistral", reasoning_parser="none"))("<tool_call> <think>")
    assert (formats.tool_parser, formats.reasoning_parser, formats.reasoning) == ("mistral", "none", None)
    with pytest.raises(PluginError, match=r"no tool_parser plugin named 'mistrel'; available: .*mistral"):
        plugin_formats(configured(tool_parser="mistrel"))("")
    with pytest.raises(PluginError, match=r"tool_parser\.hermes"):
        plugin_formats(configured(options={"tool_parser.hermes": {"x": 1}}))("")


def test_a_parser_of_another_package_is_chosen_by_name(install: Install) -> None:
    module = (
        "from callboard.plugins import CallReader, ToolFormat, hookimpl\n"
        'CALLBOARD_PLUGIN = {"api": 1}\n'
        "class Plain(CallReader):\n"
        "    def read(self):\n"
        "        yield from self.rest()\n"
        "class Format(ToolFormat):\n"
        '    markers = ("<x>",)\n'
        "    def parser(self, tools, *, exact):\n"
        "        return Plain()\n"
        "@hookimpl\n"
        "def callboard_tool_parser(context):\n"
        '    return Format() if context.template == "t" else None\n'
    )
    install("acme", {"tool_parser.plain": "acme_plain"}, {"acme_plain.py": module})
    formats = plugin_formats(configured(tool_parser="plain"))("t")
    assert formats.markers == ("<x>",)
    assert formats.tools is not None
    assert formats.tools.parser([], exact=False).push("<tool_call>") == ["<tool_call>"]
    with pytest.raises(PluginError, match="built None"):
        plugin_formats(configured(tool_parser="plain"))("")
