"""Calls of tools under the llguidance plugin: alone, in text, beside an answer; and that the parser agrees."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from engine.plugins.manager import BUILTIN
from engine.plugins.testing.parsers import Call
from engine.text.grammar import GrammarFailure
from engine.text.reasoning import Thinking
from engine.text.tool_calls import text_and_calls
from engine.text.tool_format import Tool
from engine.types.errors import RequestError
from engine.types.params import Grammar
from tests.plugins.grammar_walk import BYTES, CALL, CLOSE, EOS, PIECES, SCHEMA, SPECIAL, VOCAB, accepts, allowed
from tests.plugins.model_outputs import (
    TOOL_PARSERS,
    Subject,
    allow_calls,
    deepseek_v3,
    deepseek_v31,
    demand_calls,
    glm4,
    kimi_k2,
    mistral,
    mistral_v3,
    qwen3_coder,
    tool_format,
)


@pytest.fixture(scope="module")
def engine() -> LLGuidance:
    return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))


TOOLS = [Tool("f", SCHEMA), Tool("g", {})]


def test_calls_are_demanded_with_special_tokens_where_markers_are(engine: LLGuidance) -> None:
    one = demand_calls(TOOLS, "hermes", many=False)
    many = demand_calls(TOOLS, "hermes", many=True)
    f = (CALL, '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    g = (CALL, '\n{"name": "g", "arguments": {"z": []}}\n</tool_call>')
    assert accepts(engine, one, *f)
    assert accepts(engine, many, *f, "\n", *g)
    assert not accepts(engine, one, *f, "\n", *g)
    assert not accepts(engine, many, "text")
    assert not accepts(engine, one, CALL, '\n{"name": "h"')
    llama = demand_calls(TOOLS, "llama3_json", many=True)
    assert accepts(engine, llama, '{"name": "f", "parameters": {"a": 22}}; {"name": "g", "parameters": {}}')


@pytest.mark.parametrize("write", [mistral, deepseek_v3, kimi_k2])
def test_other_formats_are_demanded_as_their_models_write_them(write: Callable[[Sequence[Call]], str]) -> None:
    engine = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    markers = r"<｜tool▁calls▁(begin|end)｜>|<\|tool_calls_section_(begin|end)\|>"  # stand around all calls
    right, wrong = (re.sub(markers, "", write([("f", {"a": value})])) for value in (1, 2))
    forced = demand_calls(TOOLS, write.__name__, many=True)
    assert accepts(engine, forced, right)
    assert not accepts(engine, forced, wrong)
    assert not accepts(engine, forced, "text")
    free = allow_calls(TOOLS, write.__name__, None, many=True)
    assert accepts(engine, free, "Sure. ", right)
    assert not accepts(engine, free, "Sure. ", wrong)
    beside = allow_calls(TOOLS, write.__name__, Grammar("regex", "yes|no"), many=True)
    assert accepts(engine, beside, "yes")
    assert accepts(engine, beside, right)
    assert not accepts(engine, beside, "Sure.")


LINES = "fn main() {\n    <b>\n}"
WRITTEN = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["read", "write"]},
        "at": {"type": "array", "items": {"type": "integer"}},
        "row": {"$ref": "#/$defs/row"},
    },
    "$defs": {"row": {"type": "integer", "maximum": 9}},
    "required": ["path", "mode"],
    "additionalProperties": False,
}
RIGHT: list[Call] = [
    ("f", {"path": LINES, "mode": "read"}),
    ("f", {"path": "", "mode": "write", "at": [1, 2], "row": 5}),
    ("g", {"any": "thing", "other": 1}),
    ("g", {}),
]
WRONG: list[Call] = [
    ("f", {"path": "x"}),
    ("f", {"path": "x", "mode": "erase"}),
    ("f", {"path": "x", "mode": "read", "at": ["1"]}),
    ("f", {"path": "x", "mode": "read", "row": 10}),
    ("f", {"path": "x", "mode": "read", "unknown": "1"}),
    ("h", {}),
]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("write", [qwen3_coder, glm4])
def test_arguments_that_are_written_one_by_one_are_as_the_tools_say(
    write: Callable[[Sequence[Call]], str], is_special: bool
) -> None:
    form, tools = tool_format(write.__name__), [Tool("f", WRITTEN), Tool("g", {})]
    markers = [*form.markers] if is_special else []
    pieces = [*BYTES, b"<eos>", *(marker.encode() for marker in markers)]
    special = [*range(256, len(pieces))]
    engine = LLGuidance(GrammarContext(len(pieces), pieces, special, [256]))

    def accepted(grammar: Grammar, text: str) -> bool:
        split = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
        return accepts(engine, grammar, *(257 + markers.index(one) if one in markers else one for one in split))

    forced, free, beside = (
        demand_calls(tools, write.__name__, many=True),
        allow_calls(tools, write.__name__, None, many=True),
        allow_calls(tools, write.__name__, Grammar("regex", "yes|no"), many=True),
    )
    assert accepted(free, "Sure, a < b.")
    assert accepted(beside, "yes")
    assert not accepted(forced, "Sure.")
    for call in RIGHT:
        parser = form.parser(tools, exact=True)
        _, pieces_of_call = text_and_calls([*parser.push(write([call])), *parser.finish()])
        assert json.loads("".join(piece.arguments for piece in pieces_of_call)) == call[1]
        for grammar in (forced, beside):
            assert accepted(grammar, write([call])), call
        assert accepted(free, "Sure.\n" + write([call]) + "\nbye"), call
    assert accepted(forced, write(RIGHT))
    assert accepted(free, "Sure.\n" + write(RIGHT))
    for call in WRONG:
        for grammar, before in ((forced, ""), (free, "Sure.\n"), (beside, "")):
            assert not accepted(grammar, before + write([call])), call
            assert not accepted(grammar, before + write([*RIGHT, call])), call


MARKERS_AROUND = r"<｜tool▁calls▁(begin|end)｜>|<\|tool_calls_section_(begin|end)\|>"


def test_every_built_in_parser_constrains_from_the_opening() -> None:
    built_in = {name.removeprefix("tool_parser.") for name in BUILTIN if name.startswith("tool_parser.")}
    assert all(tool_format(name).constrains for name in built_in)
    assert {one.plugin for one in TOOL_PARSERS} == built_in


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("subject", TOOL_PARSERS, ids=lambda one: one.write.__name__)
def test_strict_calls_are_constrained_from_their_opening(subject: Subject, many: bool) -> None:
    """Where a call may come: text is free, and a call of any parser, alone or beside another, keeps to its tool."""
    if subject.write is mistral_v3:  # an older form, which is only read
        return
    template = "" if subject.write is not deepseek_v31 else "without fences"
    form = tool_format(subject.plugin, template)
    engine = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    grammar = form.grammar(TOOLS, None, many=many, forced=False)
    write = partial(_bare, subject.write)
    before = "" if subject.alone else "Sure. "
    assert accepts(engine, grammar, "Sure, a < b.")
    assert accepts(engine, grammar, before, write([("f", {"a": 1})]))
    assert not accepts(engine, grammar, before, write([("f", {"a": 3})])), "the schema has 1 and 22"
    two = write([("f", {"a": 1}), ("f", {"a": 22})])
    assert accepts(engine, grammar, before, two) == many
    assert not accepts(engine, grammar, before, write([("f", {"a": 1}), ("f", {"a": 3})]))


def _bare(write: Callable[[Sequence[Call]], str], calls: Sequence[Call]) -> str:
    """Write calls without the markers around them all; Kimi K2's grammar gives each the index 0."""
    return re.sub(r"(functions\.\w+):\d+", r"\1:0", re.sub(MARKERS_AROUND, "", write(calls)))


def test_a_model_that_omits_the_first_marker_is_followed_too(engine: LLGuidance) -> None:
    plain = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    free = allow_calls([Tool("f", WRITTEN)], "qwen3_coder", None, many=True)
    right, wrong = (
        qwen3_coder([("f", {"path": "x", "mode": mode})]).removeprefix("<tool_call>\n") for mode in ("read", "erase")
    )
    assert accepts(plain, free, right)
    assert not accepts(plain, free, wrong)
    assert accepts(engine, free, CALL, "\n", right)
    assert not accepts(engine, free, "so ", right), (
        "in text the marker of a model that has a token for it begins no call"
    )


F = '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("opening", [CALL, "<tool_call>"])
def test_free_text_may_hold_calls_and_they_are_as_the_tools_say(engine: LLGuidance, opening: str | int) -> None:
    # The marker is a special token in the first case, and plain text in the second.
    if isinstance(opening, str):
        engine = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    many, one = (allow_calls(TOOLS, "hermes", None, many=many) for many in (True, False))
    for grammar in (many, one):
        assert accepts(engine, grammar, "")
        assert accepts(engine, grammar, "a < b, <tool_cal")
        assert accepts(engine, grammar, "Sure.\n", opening, F)
        assert not accepts(engine, grammar, "Sure.\n", opening, F.replace("1", "2"))
        assert not accepts(engine, grammar, opening, '\n{"name": "h"')
        assert not accepts(engine, grammar, "Sure.", opening)
    assert accepts(engine, many, opening, F, "\n", opening, F, "\nbye")
    assert not accepts(engine, one, opening, F, "\n")


F_LLAMA = '{"name": "f", "parameters": {"a": 1}}'
BAD = '"parameters": {"a": 3}}'
RESEMBLE = [
    f'{{"id": 1, "name": "f", {BAD}',
    f'{{"type": "function", "name": "f", {BAD}',
    f'{{"name": "\\u0066", {BAD}',
    f'{{,"name": "f", {BAD}',
    f'{{ "name": "f", {BAD}',
    f'{{"name":"f", {BAD}',
    '{"answer": 42, "name": "f"}',
    ' {"name": "Bob"}',
    '{"name": "f',
]


def parsed(form: str, text: str) -> tuple[str, list[str | None]]:
    """The text and the names of the calls that are read from an output that had a grammar."""
    parser = tool_format(form).parser(TOOLS, exact=True)
    content, pieces = text_and_calls([*parser.push(text), *parser.finish()])
    return content, [piece.name for piece in pieces if piece.name is not None]


def test_text_that_begins_like_a_call_is_one_in_the_llama_format(engine: LLGuidance) -> None:
    grammar = allow_calls([*TOOLS, Tool("a-b.c", {})], "llama3_json", None, many=True)
    for call in (F_LLAMA, '<|python_tag|>{"name": "a-b.c", "parameters": {}}'):
        assert accepts(engine, grammar, call), call
    for wrong in (F_LLAMA.replace("1", "2"), '{"name": "f"}', "<|python_tag|>x", F_LLAMA + "; hello"):
        assert not accepts(engine, grammar, wrong), wrong


@pytest.mark.parametrize("text", ["", "hello", "[1]", "{", *RESEMBLE])
def test_what_only_resembles_a_call_is_text_to_the_grammar_and_to_the_parser(engine: LLGuidance, text: str) -> None:
    assert accepts(engine, allow_calls(TOOLS, "llama3_json", None, many=True), text)
    assert parsed("llama3_json", text) == (text, [])


@pytest.mark.parametrize("space", ["\u00a0", "\x1c", " \n\t", "\u3000\v"])
@pytest.mark.parametrize("thinking", ["none", "open"])
def test_a_call_that_breaks_its_schema_cannot_hide_behind_space(
    engine: LLGuidance, space: str, thinking: Thinking
) -> None:
    wrong = F_LLAMA.replace("1", "3")
    assert parsed("llama3_json", space + wrong)[1] == ["f"], "the parser would read it"
    source = allow_calls(TOOLS, "llama3_json", None, many=True).source
    begin = [CLOSE] if thinking == "open" else []
    assert not accepts(engine, Grammar("tool_calls", source, thinking), *begin, space, wrong)
    assert accepts(engine, Grammar("tool_calls", source, thinking), *begin, space, "hello")


NO_TYPE = {"properties": {"a": {"type": "integer"}}}
REFERENCE = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "string"}, SCHEMA]}}}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("schema", [{}, NO_TYPE, REFERENCE, {"type": ["object", "null"]}, {"description": "x"}])
def test_arguments_are_an_object_whatever_their_schema_leaves_out(
    engine: LLGuidance, form: str, schema: dict[str, Any]
) -> None:
    tools = [Tool("f", schema)]
    begin: list[str | int] = (
        [CALL, '\n{"name": "f", "arguments": '] if form == "hermes" else ['{"name": "f", "parameters": ']
    )
    end = "}\n</tool_call>" if form == "hermes" else "}"
    for grammar in (demand_calls(tools, form, many=True), allow_calls(tools, form, None, many=True)):
        assert accepts(engine, grammar, *begin, '{"a": 1}', end)
        for value in ("5", '"x"', "[1]", "null"):
            assert not accepts(engine, grammar, *begin, value, end), value


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["null", "array"]}, {"enum": [5]}])
def test_arguments_that_cannot_be_an_object_are_refused(engine: LLGuidance, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        engine.compile(demand_calls([Tool("f", schema)], "hermes", many=True))
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("special", [True, False])
def test_thoughts_may_write_of_calls_as_they_like(form: str, special: bool) -> None:
    context = GrammarContext(VOCAB, PIECES, [EOS, CLOSE], [EOS]) if special else GrammarContext(257, BYTES, [], [256])
    engine, close = LLGuidance(context), CLOSE if special else "</think>"
    free = allow_calls(TOOLS, form, None, many=True)
    call = "<tool_call>" + F if form == "hermes" else F_LLAMA
    wrong = call.replace("1", "2")
    thinking: Thinking
    for thinking, opening in (("open", ""), ("optional", "<think>")):
        grammar = Grammar(free.kind, free.source, thinking=thinking)
        assert accepts(engine, grammar, opening, "<tool_call>, ", wrong, close, "text")
        assert accepts(engine, grammar, opening, "hm", close, call)
        assert not accepts(engine, grammar, opening, "hm", close, wrong)
    assert accepts(engine, Grammar(free.kind, free.source, thinking="optional"), call)


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("answer", [Grammar("json_schema", '{"type": "array"}'), Grammar("ebnf", 'root ::= "[1]"')])
def test_calls_or_an_answer_that_has_a_grammar_of_its_own(engine: LLGuidance, form: str, answer: Grammar) -> None:
    grammar = allow_calls(TOOLS, form, answer, many=True)
    call: tuple[str | int, ...] = (CALL, F) if form == "hermes" else ('{"name": "f", "parameters": {"a": 22}}',)
    assert accepts(engine, grammar, "[1]")
    assert accepts(engine, grammar, *call)
    assert not accepts(engine, grammar, "text")
    assert not accepts(engine, grammar, "[1]", *call)
    thinking = Grammar(grammar.kind, grammar.source, thinking="open")
    assert accepts(engine, thinking, "hm, <tool_call>?", CLOSE, "\n\n", *call)
    assert accepts(engine, thinking, "hm", CLOSE, "[1]")


N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
ANSWERS: list[tuple[Grammar, list[str]]] = [
    (Grammar("json_schema", json.dumps(N)), ['{"n": 5}', '{"n":5}', '{\n  "n": 5}']),
    (Grammar("json_schema", json.dumps(NAME)), ['{"name": "Bob"}', '{"name":"Bob"}', '{"name": "fg"}', "{}"]),
    (
        Grammar("json_object"),
        [
            r'{"x": "<tool_call>{\"name\""}',
            '{"x": [1]}',
            '{"name": "Bob"}',
            '{"name": {}}',
            '{"parameters": 1, "name": "f"}',
        ],
    ),
    (Grammar("ebnf", 'root ::= "{" "\\"x\\"" "}"'), ['{"x"}']),
    (Grammar("ebnf", 'start: "<" NAME ">"\nNAME: /[a-z_]+/'), ["<b>", "<tool>", "<tool_cal>"]),
    (Grammar("regex", r"<[a-z_]+>|\{.*"), ["<tool>", "{x", '{"name": f']),
    (Grammar("choice", '["<tool_", "{\\"name\\""]'), ["<tool_", '{"name"']),
]


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("thinking", ["none", "open", "optional"])
@pytest.mark.parametrize("answer, good", ANSWERS, ids=lambda value: value.kind if isinstance(value, Grammar) else "")
def test_an_answer_may_begin_like_a_call(form: str, thinking: Thinking, answer: Grammar, good: list[str]) -> None:
    """Markers are plain text here, so that the answer's own text can spell them."""
    engine = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    grammar = Grammar("tool_calls", allow_calls(TOOLS, form, answer, many=True).source, thinking)
    call = "<tool_call>" + F if form == "hermes" else F_LLAMA
    begin = {"none": "", "open": f"hm {call}</think>", "optional": f"<think>hm {call}</think>"}[thinking]
    for text in good:
        assert accepts(engine, grammar, begin, text), text
        assert parsed(form, text) == (text, [])
    separator = "\n" if form == "hermes" else "; "
    assert accepts(engine, grammar, begin, call)
    assert accepts(engine, grammar, begin, separator.join([call] * 3))
    assert not accepts(engine, grammar, begin, call.replace("1", "3")), "not even where it would be a good answer"


def test_an_answer_of_any_text_cannot_hold_a_call_that_breaks_its_schema() -> None:
    engine = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    grammar = allow_calls(TOOLS, "hermes", Grammar("regex", "(?s:.*)"), many=True)
    for space in ("", " \n", "\u00a0"):
        wrong = f'so: <tool_call>{space}{{"name": "f", "arguments": {{"a": 3}}}}</tool_call>'
        assert not accepts(engine, grammar, wrong)
    assert accepts(engine, grammar, 'so: <tool_call> and {"name": "f"}')


def test_an_answer_that_leads_into_the_marker_alone_is_a_failure(engine: LLGuidance) -> None:
    answer = Grammar("regex", r" \{\"name\": \"f\"\}")
    matcher = engine.compile(allow_calls(TOOLS, "llama3_json", answer, many=True)).matcher()
    for byte in b' {"name": "f':
        matcher.consume(byte)
    with pytest.raises(GrammarFailure, match="nothing may follow"):
        allowed(matcher)


HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")


@pytest.mark.parametrize("special", [True, False])
def test_messages_of_harmony_are_free_but_for_those_whose_header_names_a_function(special: bool) -> None:
    markers = [marker.encode() for marker in HARMONY_MARKERS] if special else []
    pieces = [*BYTES, b"<eos>", *markers]
    ends = [EOS, len(pieces) - 1] if special else [EOS]  # gpt-oss ends an output with the marker behind a call
    engine = LLGuidance(GrammarContext(len(pieces), pieces, [*range(256, len(pieces))], ends))

    def accepted(grammar: Grammar, text: str) -> bool:
        split = re.split("(" + "|".join(map(re.escape, HARMONY_MARKERS)) + ")", text) if special else [text]
        return accepts(
            engine, grammar, *(257 + HARMONY_MARKERS.index(one) if one in split[1::2] else one for one in split)
        )

    free = allow_calls(TOOLS, "harmony", None, many=True)
    thought = "<|channel|>analysis<|message|>I write to=functions.f or h, a < b.<|end|>"
    assistant = "<|start|>assistant"
    final = "<|channel|>final<|message|>So to=functions.g"
    preamble = f"{thought}{assistant}<|channel|>commentary<|message|>I look.<|end|>{assistant}"
    for text in ("", "Sure.", thought, f"{thought}{assistant}{final}", f"{preamble}{final}"):
        assert accepted(free, text), text
    for header in (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    ):
        for value, is_right in ((1, True), (22, True), (2, False)):
            text = f'{preamble}{header}{{"a": {value}}}<|call|>'
            assert accepted(free, text) == is_right, text
            assert parsed("harmony", text)[1] == ["f"]
        assert not accepted(free, preamble + header.replace(".f", ".h") + "{}<|call|>"), "there is no such function"
        assert not accepted(free, preamble + header.replace(".f", ".ff") + "{}<|call|>")
        assert not accepted(free, f"{preamble}{header}text")
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert accepted(demand_calls(TOOLS, "harmony", many=True), f"{call}{assistant}{call}") == (not special)
    assert accepted(demand_calls(TOOLS, "harmony", many=True), call)
    assert not accepted(demand_calls(TOOLS, "harmony", many=True), final)
    answered = allow_calls(TOOLS, "harmony", Grammar("regex", "yes|no"), many=False)
    assert [accepted(answered, text) for text in ("yes", call, "no, " + call)] == [True, True, False]


@pytest.mark.parametrize("special", [True, False])
def test_a_list_of_calls_as_python_has_them_keeps_to_the_tools(special: bool) -> None:
    tags = ("<|python_tag|>", "<|python_start|>") if special else ()
    pieces = [*BYTES, b"<eos>", *(tag.encode() for tag in tags)]
    engine = LLGuidance(GrammarContext(len(pieces), pieces, [*range(256, len(pieces))], [EOS]))
    fields = {"path": {"type": "string"}, "at": {"type": "integer", "maximum": 9}, "all": {"type": "boolean"}}
    read = {"type": "object", "properties": fields, "required": ["at"], "additionalProperties": False}
    tools = [Tool("read", read), Tool("any", {})]
    free = allow_calls(tools, "pythonic", None, many=True)
    for text, written in {
        "[read(at=1)]": [("read", '{"at": 1}')],
        '[read(path="a, b)]", at=1, all=true), any()]': [
            ("read", '{"path": "a, b)]", "at": 1, "all": true}'), ("any", "{}"),
        ],
        '[any(x=[1], y={"z": ")"})]': [("any", '{"x": [1], "y": {"z": ")"}}')],
        "read(at=10)": [],
        "[1] is a footnote, [read(at=10)] is text": [],
    }.items():  # fmt: skip
        assert accepts(engine, free, text), text
        assert parsed_calls(tools, text) == written
    for text in ("[read()]", "[read(at=10)]", '[read(at=1, path="x")]', "[read(at=1, no=1)]", " [ read (at=10)]"):
        assert not accepts(engine, free, text), text
    forced = demand_calls(tools, "pythonic", many=False)
    assert accepts(engine, forced, "[any()]")
    assert not accepts(engine, forced, "[any(), any()]")
    assert not accepts(engine, forced, "Sure.")
    if special:
        assert accepts(engine, free, 258, "[read(at=1)]")
        assert not accepts(engine, free, 258, "[read(at=10)]")
    answered = allow_calls(tools, "pythonic", Grammar("json_schema", '{"type": "array"}'), many=True)
    assert [accepts(engine, answered, text) for text in ("[1]", "[read(at=1)]", "[read(at=10)]")] == [True, True, False]


def parsed_calls(tools: Sequence[Tool], text: str) -> list[tuple[str, str]]:
    parser = tool_format("pythonic").parser(tools, exact=True)
    _, pieces = text_and_calls([*parser.push(text), *parser.finish()])
    found: dict[int, tuple[str, str]] = {}
    for one in pieces:
        name, arguments = found.get(one.index, ("", ""))
        found[one.index] = (one.name or name, arguments + one.arguments)
    return [*found.values()]


def test_every_way_to_begin_a_call_has_the_values_of_its_schema_checked(engine: LLGuidance) -> None:
    even = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    free = allow_calls([Tool("f", even)], "harmony", None, many=True)
    for header in (" to=functions.f<|message|>", " to=functions.f<|channel|>commentary json<|message|>"):
        assert accepts(engine, free, f'{header}{{"a": [1, 2]}}<|call|>')
        with pytest.raises(GrammarFailure, match="does not follow the schema"):
            accepts(engine, free, f'{header}{{"a": [1, 1]}}<|call|>')


@pytest.mark.parametrize("write", ["harmony", "pythonic"])
def test_a_grammar_grows_no_faster_than_the_tools(engine: LLGuidance, write: str) -> None:
    def sizes(num_tools: int, num_fields: int) -> tuple[int, int]:
        fields = {f"field_{number}": {"description": "The number of something."} for number in range(num_fields)}
        tools = [Tool(f"f{number}", {"type": "object", "properties": fields}) for number in range(num_tools)]
        grammar = allow_calls(tools, write, None, many=True)
        return len(grammar.source), engine.compile(grammar).num_bytes

    assert sizes(30, 10)[0] < 1 << 16, "as many tools as agents have do not fit the limit of a source"
    assert sizes(1, 300)[1] < 4 * sizes(1, 100)[1]
