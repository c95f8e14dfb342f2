"""Keywords that no grammar expresses: outputs that break one must not end."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plugins.grammar import checks
from engine.plugins.grammar.bare import bare_texts
from engine.plugins.grammar.checks import Judge, Unjudged, divided
from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from engine.text.grammar import GrammarFailure
from engine.text.tool_format import CallShape, Otherwise, ValueShape, shaped_calls
from engine.types.errors import RequestError
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
        {"anyOf": [{"pattern": "a"}, {"uniqueItems": True}, {}]},
        {"$defs": {"t": {"pattern": "a"}}, "not": {"$ref": "#/$defs/t"}},
        {"$defs": {"t": {"$ref": "#/$defs/u"}, "u": {"format": "date"}}, "not": {"$ref": "#/$defs/t"}},
        {"$defs": {"u": {"uniqueItems": True}}, "anyOf": [{"$ref": "#/$defs/u"}, {"items": {"pattern": "^a"}}]},
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


def test_of_alternatives_that_differ_in_their_text_several_may_seem_to_be_followed() -> None:
    """The grammar has followed one of them."""
    texts = {"oneOf": [{"$ref": "#/$defs/u"}, {"type": "string", "format": "email"}]}
    whole = {
        "properties": {"x": texts, "y": {"uniqueItems": True}},
        "$defs": {"u": {"type": "string", "format": "uuid"}},
    }
    _, judge = divided(whole)
    assert judge is not None
    assert not judge.fault({"x": "a@b.org"})
    assert judge.fault({"x": 1}) == "x: oneOf"
    _, judge = divided(
        {"oneOf": [{"$ref": "#/$defs/n"}, {"minimum": 5}], "$defs": {"n": {"type": "integer"}}, "not": {}}
    )
    assert judge is not None
    assert judge.fault(7) == "the value: oneOf"


def test_one_alternative_may_have_text_and_a_judged_keyword() -> None:
    """An optional model of pydantic is such a union."""
    row = {"properties": {"at": {"format": "date"}, "tags": {"uniqueItems": True}}}
    for union in ([{"$ref": "#/$defs/row"}, {"type": "null"}], [row, {"type": "null"}]):
        _, judge = divided({"anyOf": union, "$defs": {"row": row}})
        assert judge is not None
        assert judge.fault({"tags": [1, 1]}) == "the value: anyOf"
        assert not judge.fault(None)


def test_a_reference_to_another_is_judged() -> None:
    _, judge = divided({"$defs": {"t": {"$ref": "#/$defs/u"}, "u": {"const": 1}}, "not": {"$ref": "#/$defs/t"}})
    assert judge is not None
    assert judge.fault(1) == "the value: not"
    assert not judge.fault(2)


def test_equal_values_are_equal_however_they_are_written() -> None:
    judge = Judge({"uniqueItems": True})
    for value in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], [[], []]):
        assert judge.fault(value)
    for value in ([1, True], [0, False], ["1", 1], [None, 0]):
        assert not judge.fault(value)


def test_a_judgement_has_an_end() -> None:
    with pytest.raises(Unjudged, match="deeper than 150 schemas"):
        Judge({"not": {"$ref": "#"}}).fault(1)
    doubling = {"anyOf": [{"$ref": "#/$defs/0"}], "$defs": {}}
    for number in range(20):
        doubling["$defs"][str(number)] = {"allOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2}  # type: ignore[call-overload]
    doubling["$defs"]["20"] = {}  # type: ignore[call-overload]
    with pytest.raises(Unjudged, match="more than 20,000 comparisons to check; simplify the schema"):
        Judge(doubling).fault(1)


NAMES = [f"n{number}" for number in range(300)]


@pytest.mark.parametrize(
    "each, one",
    [
        ({"required": NAMES}, dict.fromkeys(NAMES)),
        ({"dependentRequired": {"n0": NAMES}}, dict.fromkeys(NAMES)),
        ({"properties": dict.fromkeys(NAMES, True)}, {}),
        ({"type": [*["string"] * 300, "null"]}, None),
        ({"uniqueItems": True}, [*range(300)]),
        ({"const": NAMES}, NAMES),
        ({"const": "x" * 20_000}, "x" * 20_000),
        ({"multipleOf": 1}, 10**4000),
        ({"properties": {}, "additionalProperties": True}, dict.fromkeys(NAMES)),
        ({"$ref": "#" + "/x" * 300}, None),
    ],
    ids=["required", "dependentRequired", "properties", "type", "unique", "const", "text", "number", "names", "ref"],
)
def test_what_is_large_is_as_much_work_as_it_takes(each: dict[str, Any], one: Any) -> None:
    """100 times 300 comparisons are too many, and are not made; 20 times 300 are."""
    schema: dict[str, Any] = {"items": each}
    place = schema
    for _ in range(300):
        place["x"] = {}
        place = place["x"]
    assert not Judge(schema).fault([one] * 20)
    with pytest.raises(Unjudged, match="more than 20,000 comparisons"):
        Judge(schema).fault([one] * 100)


def test_listed_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = checks.msgspec.json.encode
    monkeypatch.setattr(checks.msgspec.json, "encode", lambda *args, **kw: encoded.append(1) or encode(*args, **kw))
    assert not Judge({"items": {"enum": NAMES}, "uniqueItems": True}).fault(NAMES)
    assert len(encoded) == 3 * len(NAMES)


def test_the_schema_for_names_that_no_value_reads_is_no_work() -> None:
    tree = {"$defs": {name: {} for name in NAMES}, "items": {"$ref": "#"}, "uniqueItems": True}
    assert not Judge(tree).fault([[number] for number in range(300)])


def test_judgements_at_once_count_their_own_work() -> None:
    """A list that has another value judged while it is read stands for a thread in between."""

    class Interrupting(list[int]):
        def __iter__(self) -> Iterator[int]:
            for one in super().__iter__():
                judge.fault([])
                yield one

    judge = Judge({"contains": True})
    with pytest.raises(Unjudged, match="comparisons"):
        judge.fault(Interrupting(range(150_000)))


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "contains", "items"])
def test_the_deepest_schema_that_is_judged_does_not_meet_the_limit_of_python(keyword: str) -> None:
    schema: dict[str, Any] = {"type": ["array", "integer"]}
    value: Any = 1
    for _ in range(149):
        schema = {keyword: [schema] if keyword.endswith("Of") else schema}
        value = value if keyword.endswith("Of") else [value]
    assert not Judge(schema).fault(value)
    with pytest.raises(Unjudged, match="deeper than 150 schemas, too deep to check; make the schema flatter"):
        Judge({"allOf": [schema]}).fault(value)


def test_multiples_are_exact() -> None:
    for value, step in ((10**40 + 1, 2), (1e40, 3), (0.35, 0.1), (10**4000 + 1, 0.5e-300 * 2**60)):
        assert Judge({"multipleOf": step}).fault(value)
    for value, step in ((10**40, 2), (0.3, 0.1), (1e300, 1e-300), (-7.5, 2.5), (10**4000, 1e-300)):
        assert not Judge({"multipleOf": step}).fault(value)
    for value, step in ((float("inf"), 1), (1, 0)):
        with pytest.raises(Unjudged, match="makes no sense"):
            Judge({"multipleOf": step}).fault(value)


@pytest.mark.parametrize(
    "schema_of",
    [
        lambda size: {"anyOf": [{"type": "integer"}] * size + [{"uniqueItems": True}]},
        lambda size: {"$defs": {"all": {"allOf": [{}] * size}}, "not": {"anyOf": [{"$ref": "#/$defs/all"}] * size}},
        lambda size: nested_unions(size // 2),
    ],
    ids=["alternatives", "references", "nested unions"],
)
def test_a_schema_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch, schema_of: Any) -> None:
    work = []
    parts = checks.parts
    monkeypatch.setattr(checks, "parts", lambda schema: work.append(1) or parts(schema))

    def work_of(size: int) -> int:
        work.clear()
        assert divided(json.loads(json.dumps(schema_of(size))))[1] is not None
        return len(work)

    assert work_of(200) < 2.1 * work_of(100)


def nested_unions(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"uniqueItems": True}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "null"}, schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"format": []}},
        {"not": {"format": {}}},
        {"anyOf": [{"uniqueItems": True}], "$ref": "#/anyOf/" + "9" * 5000},
        {"not": {"$ref": "#/not/type/x"}, "type": "array"},
        {"anyOf": 5, "not": {"const": 1}},
        {"oneOf": {}, "uniqueItems": True},
        {"not": {"required": 5}},
        {"uniqueItems": True, "allOf": [5]},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_schema_that_makes_no_sense_is_refused_or_judged(engine: LLGuidance, schema: dict[str, Any]) -> None:
    compile_or_refuse(engine, grammar(schema))
    compile_or_refuse(engine, written_one_by_one(schema))


@pytest.mark.parametrize(
    "schema",
    [{"type": [{}]}, {"type": {}}, {"anyOf": 5}, {"oneOf": True}, {"$ref": "#/x/" + "9" * 5000}],
    ids=["types", "type", "alternatives", "one alternative", "reference"],
)
def test_an_argument_with_a_schema_that_makes_no_sense_is_refused(engine: LLGuidance, schema: dict[str, Any]) -> None:
    assert bare_texts(schema, schema) == []
    with pytest.raises(RequestError):
        engine.compile(written_one_by_one(schema))


def written_one_by_one(schema: Any) -> Grammar:
    values = [ValueShape("<x>", schema, "</x>", "x", is_required=True)]
    whole = {"type": "object", "properties": {"x": schema}}
    return shaped_calls([CallShape("<f>", whole, "</f>", "f", values)], "\n", many=False)


def compile_or_refuse(engine: LLGuidance, source: Grammar) -> None:
    with suppress(RequestError):
        engine.compile(source).matcher()


WORDS = st.sampled_from([
    "type", "format", "$ref", "$defs", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf",
    "oneOf", "allOf", "minimum", "minLength", "maxItems", "multipleOf", "additionalProperties", "pattern",
    "propertyNames", "additionalItems", *checks.JUDGED,
])  # fmt: skip
LEAVES = st.sampled_from([
    None, True, False, 0, 1, -1, 2.0, 0.5, 1e300, 10**30, "", "x", "object", "array", "string", "integer", "date", "#",
    "#/$defs/x", "#/anyOf/0", "#/items", "#/anyOf/99999999999999999999",
])  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.just("x"), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, value=SCHEMAS)
def test_no_schema_makes_an_error_of_the_server(engine: LLGuidance, schema: Any, value: Any) -> None:
    compile_or_refuse(engine, grammar(schema))
    compile_or_refuse(engine, written_one_by_one(schema))
    with suppress(Unjudged):
        Judge(schema).fault(value)


def test_numbers_of_too_many_digits_end_the_output(engine: LLGuidance) -> None:
    schema = {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
    for number in ("1" * 4301, "0." + "1" * 4301, "1e400"):
        with pytest.raises(GrammarFailure, match=r"cannot be checked: a number has too many digits.*at most 4,300"):
            accepts(engine, grammar(schema), f"[{number}]")
    assert accepts(engine, grammar(schema), f"[{'1' * 4300}, 1e300]")
