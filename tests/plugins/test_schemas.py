"""Schemas as pydantic, zod and MCP write them: no refusal of what asks for nothing, and one that says where."""

import json
from typing import Any

import msgspec
import pytest

from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.grammar.schemas import FORMATS, simplified
from engine.plugins.hookspecs import GrammarContext
from engine.text.tool_format import CallShape, TagsShape
from engine.types.errors import RequestError
from engine.types.params import Grammar
from tests.plugins.grammar_walk import EOS, PIECES, SPECIAL, VOCAB, accepts


@pytest.fixture(scope="module")
def engine() -> LLGuidance:
    return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))


def grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


ANNOTATED = [
    *(
        {"type": "string", "format": name}
        for name in ("path", "binary", "password", "base64", "regex", "uri-reference")
    ),
    {"type": "array", "uniqueItems": False},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    {"type": "object", "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
    {"type": "array", "minContains": 1, "maxContains": 2},
    {"type": "string", "then": {"minLength": 3}, "else": {}},
]


@pytest.mark.parametrize("schema", ANNOTATED, ids=json.dumps)
def test_what_asks_for_nothing_is_left_out_wherever_it_stands(engine: LLGuidance, schema: dict[str, Any]) -> None:
    engine.compile(grammar(schema))
    for outer in (
        {"type": "object", "properties": {"a": schema}, "required": ["a"]},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}},
        {"$defs": {"d": schema}, "$ref": "#/$defs/d"},
    ):
        engine.compile(grammar(outer))


def test_what_only_looks_like_a_schema_stays(engine: LLGuidance) -> None:
    schema = {"enum": [{"uniqueItems": False}], "properties": {"format": {"type": "string"}}}
    assert simplified(schema) == schema
    assert accepts(engine, grammar({"const": {"uniqueItems": False}}), '{"uniqueItems":false}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_can_be_followed_is(engine: LLGuidance, name: str) -> None:
    assert simplified({"format": name}) == {"format": name}
    assert accepts(engine, grammar({"type": "string", "format": name}), '"!"') == (name == "unknown")


@pytest.mark.parametrize(
    "names, good, bad",
    [
        ({"enum": ["a", "b"]}, "b", "c"),
        ({"const": "a"}, "a", "b"),
        ({"type": "string", "pattern": "^x"}, "xy", "y"),
        ({"minLength": 2, "maxLength": 3}, "ab", "a"),
    ],
)
def test_names_of_properties_keep_to_their_schema(
    engine: LLGuidance, names: dict[str, Any], good: str, bad: str
) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert accepts(engine, grammar(schema), json.dumps({good: 1}))
    assert not accepts(engine, grammar(schema), json.dumps({bad: 1}))
    assert not accepts(engine, grammar(schema), json.dumps({good: "x"}))


ID_OR_NAME = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
    "additionalProperties": False,
    "oneOf": [{"required": ["id"]}, {"required": ["name"]}],
}


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        (ID_OR_NAME, '{"name": "x"}', "{}"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1.5", '"x"'),
        ({"type": "string", "oneOf": [{"format": "email"}, {"format": "uri"}]}, '"a@b.org"', '"!"'),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                    {"type": "array"},
                ]
            },
            '{"a": null}',
            '{"a": 1}',
        ),
    ],
    ids=["required", "numbers", "formats", "open objects"],
)
def test_one_of_several_that_overlap_is_any_of_them(
    engine: LLGuidance, schema: dict[str, Any], good: str, bad: str
) -> None:
    assert accepts(engine, grammar(schema), good)
    assert not accepts(engine, grammar(schema), bad)


def test_one_of_several_that_overlap_may_be_refused() -> None:
    strict = LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS], options={"coerce_one_of": False}))
    with pytest.raises(RequestError, match="coerce_one_of"):
        strict.compile(grammar(ID_OR_NAME))
    apart = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert accepts(strict, grammar(apart), "1")


def test_a_count_may_be_written_as_a_decimal(engine: LLGuidance) -> None:
    schema = grammar({"type": "array", "items": {"type": "string", "maxLength": 1.0}, "maxItems": 2.0})
    assert accepts(engine, schema, '["a", "b"]')
    assert not accepts(engine, schema, '["a", "b", "c"]')
    assert not accepts(engine, schema, '["ab"]')


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"unevaluatedItems": False}, ": Unimplemented"),
        ({"not": {"pattern": "a"}}, ": Unimplemented"),
        ({"type": "array", "uniqueItems": "yes"}, ": "),
        ({"properties": {"a b": {"items": {"anyOf": [{}, {"not": {}}]}}}}, "properties['a b'].items.anyOf[1]: "),
        ({"$defs": {"n": {"not": {}}}, "properties": {"x": {"$ref": "#/$defs/n"}}}, "properties.x: "),
        ({"properties": {"x": {}}, "propertyNames": {"pattern": "a"}}, ": Unimplemented"),
    ],
)
def test_a_refusal_says_where(engine: LLGuidance, schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.compile(grammar(schema))
    assert refused.value.message.startswith(
        f"the grammar or schema cannot be used{': ' if place[0] != ':' else ''}{place}"
    )
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(
    "schema",
    [
        {"format": ["date"]},
        {"format": {}},
        {"propertyNames": {"enum": 5}},
        {"propertyNames": {"pattern": ["a"]}},
        {"propertyNames": {"pattern": 5}},
        {"propertyNames": {"minLength": "1"}},
        {"type": "string", "maxLength": 2.5},
        {"type": "string", "maxLength": 1e300},
    ],
    ids=json.dumps,
)
def test_a_word_with_a_value_of_a_wrong_type_is_refused(engine: LLGuidance, schema: dict[str, Any]) -> None:
    for part in (schema, {"type": "object", "properties": {"x": schema}}):
        with pytest.raises(RequestError, match="the grammar or schema cannot be used"):
            engine.compile(grammar(part))


TAGS = TagsShape(
    ["<f=", "<g>"],
    [
        CallShape("<f=a>", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, "</f>"),
        CallShape("<f=b>", {"type": "string"}, "</f>"),
        CallShape("<g>", {"type": "integer"}, "</g>"),
    ],
)


@pytest.mark.parametrize(
    "text, free, first, only",
    [
        ("plain < text", True, False, False),
        ('<f=a>{"x": 1}</f>', True, True, True),
        ('hi <f=b>"q"</f> and <g>3</g>.', True, True, False),
        ('<f=a>{"y": 1}</f>', False, False, False),
        ("<f=c>1</f>", False, False, False),
        ('<g>"a"</g>', False, False, False),
    ],
)
def test_a_trigger_begins_one_of_the_tags(engine: LLGuidance, text: str, free: bool, first: bool, only: bool) -> None:
    for expected, fields in (
        (free, {}),
        (first, {"at_least_one": True}),
        (only, {"at_least_one": True, "stop_after_first": True}),
    ):
        shape = msgspec.structs.replace(TAGS, **fields)
        assert accepts(engine, Grammar("structural_tag", msgspec.json.encode(shape).decode()), text) == expected
