"""The llguidance plugin: masks that mean what the grammar says, and bombs that are refused in bounded time."""

import json
import time
from typing import Any

import numpy as np
import pytest

from engine.plugins.grammar import repeats
from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from engine.text.grammar import GrammarFailure
from engine.text.tool_format import Tool
from engine.types.errors import RequestError
from engine.types.params import MAX_GRAMMAR_CHARS, Grammar
from tests.plugins.grammar_walk import BYTES, CALL, CLOSE, EOS, PIECES, SCHEMA, SPECIAL, VOCAB, accepts, allowed
from tests.plugins.model_outputs import allow_calls, demand_calls


@pytest.fixture(scope="module")
def engine() -> LLGuidance:
    return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))


@pytest.mark.parametrize(
    "grammar, good, bad",
    [
        (Grammar("json_object"), '{"x": [1, null]}', "[1]"),
        (Grammar("json_schema", json.dumps(SCHEMA)), '{"a": 22}', '{"a": 2}'),
        (Grammar("json_schema", json.dumps(SCHEMA)), '{\n    "a":\n        1\n}', '{"a": 1, "b": 1}'),
        (Grammar("json_schema", "true"), "[]", "x"),
        (Grammar("regex", r"[a-c]{2}-\d+"), "ab-12", "ab-"),
        (Grammar("regex", "a/b"), "a/b", "a"),
        (Grammar("choice", '["yes", "no \\"q\\" é"]'), 'no "q" é', "no"),
        (Grammar("ebnf", 'root ::= "x" tail\ntail ::= [0-9]+'), "x42", "x"),
        (Grammar("ebnf", 'start: "x" /[0-9]+/'), "x42", "42"),
    ],
)
def test_every_kind_of_grammar(engine: LLGuidance, grammar: Grammar, good: str, bad: str) -> None:
    assert accepts(engine, grammar, good)
    assert not accepts(engine, grammar, bad)


def test_longer_tokens_are_allowed_where_their_text_is(engine: LLGuidance) -> None:
    matcher = engine.compile(Grammar("json_schema", json.dumps(SCHEMA))).matcher()
    assert allowed(matcher) == {ord("{"), PIECES.index(b'{"a"')}


def test_padding_and_special_tokens_are_never_allowed(engine: LLGuidance) -> None:
    anything = engine.compile(Grammar("regex", "(?s:.*)")).matcher()
    assert not allowed(anything) & {CALL, CLOSE, 259, *range(len(PIECES), VOCAB)}
    assert EOS in allowed(anything)


def test_the_end_is_the_only_way_on_once_the_grammar_is_done(engine: LLGuidance) -> None:
    matcher = engine.compile(Grammar("regex", "a")).matcher()
    matcher.consume(ord("a"))
    assert allowed(matcher) == {EOS}
    matcher.consume(EOS)
    assert allowed(matcher) == {EOS}, "a token after the end is dropped, but must not fail"


def test_matchers_of_one_grammar_do_not_know_each_other(engine: LLGuidance) -> None:
    compiled = engine.compile(Grammar("regex", "a+|b+"))
    first, second = compiled.matcher(), compiled.matcher()
    first.consume(ord("a"))
    assert allowed(first) == {ord("a"), EOS}
    assert allowed(second) == {ord("a"), ord("b")}


def test_a_token_that_breaks_the_grammar_is_a_failure(engine: LLGuidance) -> None:
    matcher = engine.compile(Grammar("regex", "a+")).matcher()
    with pytest.raises(GrammarFailure):
        matcher.consume(ord("b"))
    with pytest.raises(GrammarFailure):
        allowed(matcher)


def test_thoughts_are_free_and_the_answer_is_not(engine: LLGuidance) -> None:
    # The closing marker is a special token of this vocabulary, and the opening one is plain text.
    open_ended = Grammar("choice", '["yes"]', thinking="open")
    assert accepts(engine, open_ended, "so, {what}? ", CLOSE, "\n\nyes")
    assert not accepts(engine, open_ended, "yes")
    maybe = Grammar("choice", '["yes"]', thinking="optional")
    assert accepts(engine, maybe, "<think>anything", CLOSE, "yes")
    assert accepts(engine, maybe, "yes")
    assert not accepts(engine, maybe, "no")


def test_markers_that_are_plain_text_end_thoughts_as_well() -> None:
    plain = LLGuidance(GrammarContext(257, [*BYTES, b"<eos>"], [EOS], [EOS]))
    grammar = Grammar("regex", "[0-9]", thinking="open")
    matcher = plain.compile(grammar).matcher()
    for byte in b"a </thi </think>\n7":
        matcher.consume(byte)
    mask = np.zeros(9, dtype=np.int32)
    matcher.fill(mask)
    assert mask[EOS // 32] >> EOS % 32 & 1


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


DOUBLING = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2} if n else {"type": "object"} for n in range(40)}
REFUSED = {
    "unknown type": Grammar("json_schema", '{"type": "nonsense"}'),
    "not a schema": Grammar("json_schema", "[1]"),
    "not JSON": Grammar("json_schema", "{"),
    "deep JSON": Grammar("json_schema", '{"not":' * 9000 + "1" + "}" * 9000),
    "keyword that is not known": Grammar("json_schema", '{"type": "object", "unevaluatedProperties": {}}'),
    "nothing fits": Grammar("json_schema", "false"),
    "a reference outside": Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/schema"}'),
    "a reference to a file": Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "an open parenthesis": Grammar("regex", "("),
    "parentheses": Grammar("regex", "(" * 20_000 + ")" * 20_000),
    "a look-ahead": Grammar("regex", "a(?=b)"),
    "a back reference": Grammar("regex", r"(a)\1"),
    "no choice": Grammar("choice", "[]"),
    "an empty choice": Grammar("choice", '["a", ""]'),
    "too many choices": Grammar("choice", json.dumps([str(n) for n in range(5000)])),
    "no grammar": Grammar("ebnf", "nonsense {{{{"),
    "an unknown rule": Grammar("ebnf", 'root ::= "a" b'),
    "deep EBNF": Grammar("ebnf", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
}
BOMBS = {
    "repeated repeats": Grammar("regex", "((((a{100}){100}){100}){100}){100}"),
    "a Lark bomb": Grammar("ebnf", 'start: a{60000}\na: b{60000}\nb: "x"'),
    "dots": Grammar("regex", "(.*a){20}.{50}b"),
    "exponential states": Grammar("regex", ".*a.{200}"),
    "alternatives": Grammar("regex", "(a|aa)+" * 50 + "b"),
    "unicode": Grammar("regex", r"\w{5000}"),
    "deep schema": Grammar("json_schema", json.dumps(nested(60))),
    "doubling": Grammar("json_schema", json.dumps({"$defs": DOUBLING, "$ref": "#/$defs/d39"})),
    "a large enum": Grammar("json_schema", json.dumps({"enum": [f"{n:x>6}" for n in range(6000)]})),
    "many properties": Grammar(
        "json_schema", json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}})
    ),
    "long strings": Grammar("json_schema", '{"type": "string", "minLength": 100000, "maxLength": 1000000}'),
    "many items": Grammar(
        "json_schema", '{"type": "array", "minItems": 10000, "items": {"type": "array", "minItems": 900}}'
    ),
    "left recursion": Grammar("ebnf", 'start: start start | "a" | ""'),
}
LONG = {"type": "string", "minLength": 30000}
MILLION_LETTERS = {"type": "string", "minLength": 1000000}


def of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def of_object(schema: Any, *required: str) -> Any:
    return {"type": "object", "properties": {"x": schema, "y": {"type": "integer"}}, "required": list(required)}


MILLION = {
    "a repeat": Grammar("regex", "a{1000000}"),
    "nested": Grammar("regex", "(a{1000}){1000}"),
    "nested thrice": Grammar("regex", "x((?:[a-z]{100}y){100,}[)]?){100,900}"),
    "in a row": Grammar("regex", "a{1000}{1000}"),
    "once or more": Grammar("regex", "(a{1000000})+"),
    "a number beyond all": Grammar("regex", "a{" + "9" * 5000 + "}"),
    "every alternative": Grammar("regex", "(a{1000}|b{2000}){1000}|c{1000000}"),
    "in Lark": Grammar("ebnf", 'start: "a"{1000000}'),
    "in Lark's own way": Grammar("ebnf", 'start: X ~ 1000000\nX: "a"'),
    "an expression in Lark": Grammar("ebnf", "start: (/[a-z]{1000}/ {1000})"),
    "every alternative in Lark": Grammar("ebnf", 'x: "b"\nstart: "a"{1000000} // "a" |\n  | "b"{1000000}\ny: "c"'),
    "in GBNF": Grammar("ebnf", 'root ::= ([a-z]{1000} "-"){1000}'),
    "pattern": of_schema(of_object({"type": "string", "pattern": "^(a{1000}){1000}$"}, "x")),
    "minLength": of_schema(MILLION_LETTERS),
    "minLength as a float": of_schema({"type": "string", "minLength": 1e6}),
    "minLength of what is required": of_schema(of_object(of_object(MILLION_LETTERS, "x"), "x", "y")),
    "every schema of some": of_schema({"anyOf": [MILLION_LETTERS, {"oneOf": [MILLION_LETTERS]}]}),
    "of a call": demand_calls([Tool("f", of_object(MILLION_LETTERS, "x"))], "hermes", many=True),
}
CAN_BE_SATISFIED = {
    "escaped": Grammar("regex", r"\{1000000\}[{1000000}]a{3} {4}a{0,1000000}"),
    "a space between": Grammar("regex", "a{1000} {1000}"),
    "an alternative": Grammar("regex", "a{30000}|b"),
    "an alternative within": Grammar("regex", "x(a{30000}|(b|c{9}){3})y"),
    "an optional part": Grammar("regex", "x(a{30000})?(b{30000})*(c{30000}){0,3}"),
    "a code point": Grammar("regex", r"\x{20001}[a-z[0-9]{30000}]"),
    "a comment": Grammar("regex", "(?x)a # a{30000}\n"),
    "a string in Lark": Grammar("ebnf", 'start: "a{1000000}" {3}  // x{1000000}'),
    "an alternative in Lark": Grammar("ebnf", 'start: "a"{30000}\n  | "b"\n'),
    "a rule that is not used": Grammar("ebnf", 'start: "b"\nx: "a"{30000}'),
    "a schema in Lark": Grammar("ebnf", 'start: "a"{30000} %json {"type": "integer"} | "b"'),
    "a class in GBNF": Grammar("ebnf", "root ::= [a{30000}]"),
    "an alternative in GBNF": Grammar("ebnf", 'root ::= ("a"{30000} | "b") x*\nx ::= "a"{30000}'),
    "maxLength": of_schema({"type": "string", "minLength": 3, "maxLength": 1000000}),
    "maxItems": of_schema({"type": "array", "maxItems": 1000000, "items": {"type": "integer"}}),
    "a property of that name": of_schema(of_object({"const": {"minItems": 1000000}}, "x")),
    "a property that is not required": of_schema(of_object(LONG, "y")),
    "one schema of some": of_schema({"anyOf": [LONG, {"type": "integer"}]}),
    "another type": of_schema({"type": ["string", "integer"], "minLength": 30000}),
    "no type": of_schema({"properties": {"x": LONG}, "required": ["x"], "minLength": 30000}),
    "a definition": of_schema({"$defs": {"a": LONG}, "definitions": {"b": LONG}, "type": "integer"}),
    "items": of_schema({"type": "array", "minItems": 50, "items": {"type": "string", "minLength": 401}}),
    "many items": of_schema({"type": "array", "minItems": 21000, "items": {"type": "boolean"}}),
    "one call of two": demand_calls([Tool("f", of_object(LONG, "x")), Tool("g", {})], "hermes", many=True),
    "a call that need not come": allow_calls([Tool("f", of_object(LONG, "x"))], "hermes", None, many=True),
    "beside calls": allow_calls([Tool("f", {})], "hermes", Grammar("regex", "a{30000}"), many=True),
}
LIMIT_S = 5.0  # of computing, which a busy machine does not prolong: the slowest takes one second


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(engine: LLGuidance, name: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError) as refused:
        engine.compile(REFUSED[name])
    assert refused.value.status == 400
    assert len(refused.value.message) < 400
    assert time.process_time() - started < LIMIT_S


@pytest.mark.parametrize("name", MILLION)
def test_what_repeats_a_million_times_is_refused(engine: LLGuidance, name: str) -> None:
    with pytest.raises(RequestError, match=r"repeats something \d+ times; at most 20000 repetitions") as refused:
        engine.compile(MILLION[name])
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")


@pytest.mark.parametrize("name", CAN_BE_SATISFIED)
def test_what_can_be_satisfied_is_compiled(engine: LLGuidance, name: str) -> None:
    assert allowed(engine.compile(CAN_BE_SATISFIED[name]).matcher())


def test_what_a_schema_excludes_is_not_demanded() -> None:
    for name in ("not", "if", "then", "else", "$defs", "examples", "default"):
        assert repeats.of_schema({"type": "string", name: LONG}) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": "30000", "pattern": 5},
        {"type": "object", "properties": [LONG], "required": ["x"]},
        {"type": "object", "properties": {"x": LONG}, "required": "x"},
        {"anyOf": {"x": LONG}, "oneOf": []},
        [LONG],
        True,
    ],
)
def test_a_schema_that_is_wrong_demands_nothing(schema: Any) -> None:
    assert repeats.of_schema(schema) == 1


def test_counting_is_linear() -> None:
    """Quadratic would take minutes."""
    for scrap in (
        "[",
        '"',
        "(",
        ")",
        "{",
        "{1",
        "{1, ",
        "\\",
        "/",
        "/a",
        "~ ",
        "{ ",
        "(a{1000})",
        "a{9}",
        "#",
        "|",
        "[a[",
        "\\x{",
        "(?",
        "\nstart",
        "\n \t",
        "a[",
    ):
        text = scrap * (MAX_GRAMMAR_CHARS // len(scrap))
        assert repeats.of_expression(text) >= 1
        assert repeats.of_lark("start: " + text) >= 1
        assert repeats.of_lark(("start" + text)[: len(text)]) >= 1


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_bounded_time(engine: LLGuidance, name: str) -> None:
    """Compiled or refused, and then followed for a while: each step is bounded, and the end may be a failure."""
    started = time.process_time()
    try:
        matcher = engine.compile(BOMBS[name]).matcher()
        for _ in range(30):
            matcher.consume(min(allowed(matcher) - {EOS}, default=EOS))
    except (RequestError, GrammarFailure):
        pass
    assert time.process_time() - started < LIMIT_S


def test_a_grammar_that_can_be_read_in_ever_more_ways_ends_its_request() -> None:
    """Each token takes longer than the one before."""
    engine = LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS], options={"max_items_in_row": 200}))
    matcher = engine.compile(Grammar("ebnf", 'root ::= root root root | root root | "a" | "aa" | "aaa"')).matcher()
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    with pytest.raises(GrammarFailure, match="items; max is 200"):
        for _ in range(1900):
            matcher.consume(ord("a"))
            matcher.fill(mask)
