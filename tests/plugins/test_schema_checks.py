"""Keywords that no grammar expresses: outputs that break one must not end."""

import json
from typing import Any

import pytest

from engine.plugins.grammar.checks import Judge, Unjudged, divided
from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from engine.text.grammar import GrammarFailure
from engine.text.tool_format import CallShape, Otherwise, shaped_calls
from engine.types.params import Grammar
from tests.plugins.grammar_walk import CLOSE, EOS, PIECES, SPECIAL, VOCAB, accepts, allowed

ROW = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
NAMED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> LLGuidance:
    return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))


def grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        (ROW, "[1, 2]", "[1, 2, 1]"),
        ({"type": "array", "items": {"type": "array", "items": {"enum": [1, 2]}}, "uniqueItems": True},
         "[[1], [2]]", "[[1], [1]]"),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, "[1, 7]", "[1]"),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxContains": 1},
         "[7]", "[7, 8]"),
        ({"type": "integer", "not": {"enum": [3, 4]}}, "5", "4"),
        ({**NAMED, "dependentRequired": {"a": ["b"]}}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({**NAMED, "dependencies": {"a": ["b"]}}, '{"b": 2}', '{"a": 1}'),
        ({**NAMED, "dependentSchemas": {"a": {"required": ["b"]}}}, "{}", '{"a": 1}'),
        ({**NAMED, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
         '{"a": 2}', '{"a": 1}'),
        ({**NAMED, "if": {"required": ["a"]}, "else": {"properties": {"b": {"maximum": 3}}}}, '{"b": 3}', '{"b": 4}'),
        ({"type": "object", "properties": {"rows": ROW}, "additionalProperties": False}, '{"rows": []}',
         '{"rows": [5, 5]}'),
        ({"$defs": {"row": ROW}, "type": "array", "items": {"$ref": "#/$defs/row"}}, "[[1], [1]]", "[[1, 1]]"),
        ({"anyOf": [{**ROW, "maxItems": 3}, {"type": "array", "items": {"const": 0}}]}, "[0, 0]", "[0, 1, 1]"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_an_output_that_breaks_such_a_keyword_cannot_end(
    engine: LLGuidance, schema: dict[str, Any], good: str, bad: str
) -> None:
    assert accepts(engine, grammar(schema), good)
    with pytest.raises(AssertionError if schema.get("type") == "integer" else GrammarFailure):
        assert accepts(engine, grammar(schema), bad)


def test_a_failure_names_the_place_and_the_keyword(engine: LLGuidance) -> None:
    schema = {"type": "object", "properties": {"rows": {"type": "array", "items": ROW}}, "additionalProperties": False}
    with pytest.raises(GrammarFailure, match=r"does not follow the schema: rows\[1\]: uniqueItems"):
        accepts(engine, grammar(schema), '{"rows": [[1], [2, 2]]}')


def test_a_number_that_may_still_grow_is_not_the_end(engine: LLGuidance) -> None:
    """4 is forbidden and 42 is not, so the output goes on."""
    matcher = engine.compile(grammar({"type": "integer", "not": {"const": 4}})).matcher()
    matcher.consume(ord("4"))
    assert EOS not in (more := allowed(matcher))
    assert ord("2") in more
    matcher.consume(ord("2"))
    assert EOS in allowed(matcher)


CALLS = [CallShape('<f>{"arguments": ', {"properties": {"x": ROW}, "additionalProperties": False}, "}", "f")]


def test_each_call_is_judged_when_it_is_whole(engine: LLGuidance) -> None:
    demanded = shaped_calls(CALLS, "\n", many=True)
    good, bad = '<f>{"arguments": {"x": [1, 2]}}', '<f>{"arguments": {"x": [1, 1]}}'
    assert accepts(engine, demanded, f"{good}\n{good}")
    for output in (bad, f"{good}\n{bad}"):
        with pytest.raises(GrammarFailure, match=r"x: uniqueItems"):
            accepts(engine, demanded, output)


def test_a_call_in_free_text_and_an_answer_beside_calls_are_judged(engine: LLGuidance) -> None:
    in_text = shaped_calls(CALLS, "\n", many=True, otherwise=Otherwise("text", opening="<f>"))
    assert accepts(engine, in_text, 'so: [1, 1] <f>{"arguments": {"x": [1]}} and [1, 1]')
    with pytest.raises(GrammarFailure, match=r"x: uniqueItems"):
        accepts(engine, in_text, 'so <f>{"arguments": {"x": [1, 1]}}')
    answered = shaped_calls(CALLS, "\n", many=True, otherwise=Otherwise("json_schema", json.dumps(ROW)))
    assert accepts(engine, answered, "[1, 2]")
    with pytest.raises(GrammarFailure, match=r"the value: uniqueItems"):
        accepts(engine, answered, "[1, 1]")


def test_thoughts_are_not_judged(engine: LLGuidance) -> None:
    thought = Grammar("json_schema", json.dumps(ROW), thinking="open")
    assert accepts(engine, thought, "[1, 1] ", CLOSE, "[1, 2]")
    with pytest.raises(GrammarFailure):
        accepts(engine, thought, "[1, 2] ", CLOSE, "[1, 1]")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "(a+)+$"}},
        {"if": {"properties": {"x": {"format": "date"}}}, "then": {"required": ["y"]}},
        {"anyOf": [{"pattern": "a", "uniqueItems": True}, {}]},
        {"$defs": {"t": {"pattern": "a"}}, "not": {"$ref": "#/$defs/t"}},
        {"not": {"$ref": "elsewhere.json"}},
        {"dependentRequired": 5},
        {"contains": {}, "minContains": "2"},
    ],
    ids=json.dumps,
)
def test_what_depends_on_text_or_makes_no_sense_is_left_whole(schema: dict[str, Any]) -> None:
    assert divided(schema) == (schema, None)


def test_words_among_values_are_no_keywords() -> None:
    schema = {"enum": [{"not": 1}], "properties": {"not": {"type": "string"}}, "default": {"uniqueItems": True}}
    assert divided(schema) == (schema, None)
    whole = {**schema, "uniqueItems": True}
    assert divided(whole)[0] == schema


def test_equal_values_are_equal_however_they_are_written() -> None:
    judge = Judge({"uniqueItems": True})
    for value in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], [[], []]):
        assert judge.fault(value)
    for value in ([1, True], [0, False], ["1", 1], [None, 0]):
        assert not judge.fault(value)


def test_a_judgement_has_an_end() -> None:
    with pytest.raises(Unjudged, match="nested too deep"):
        Judge({"not": {"$ref": "#"}}).fault(1)
    doubling = {"anyOf": [{"$ref": "#/$defs/0"}], "$defs": {}}
    for number in range(20):
        doubling["$defs"][str(number)] = {"allOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2}  # type: ignore[call-overload]
    doubling["$defs"]["20"] = {}  # type: ignore[call-overload]
    with pytest.raises(Unjudged, match="too much work"):
        Judge(doubling).fault(1)
