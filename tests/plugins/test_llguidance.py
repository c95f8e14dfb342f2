"""The llguidance plugin: masks that mean what the grammar says, and bombs that are refused in bounded time."""

import json
import time
from typing import Literal

import numpy as np
import pytest

from engine.errors import RequestError
from engine.plugins.grammar.llguidance import LLGuidance
from engine.plugins.hookspecs import GrammarContext
from engine.sampling.grammar import GrammarFailure, Matcher
from engine.sampling.grammars import Grammars
from engine.sampling.params import Grammar
from engine.text.tool_format import Tool, ToolFormat, allow_calls, demand_calls

BYTES = [bytes([byte]) for byte in range(256)]
EOS, CALL, CLOSE = 256, 257, 258
PIECES = [*BYTES, b"<eos>", b"<tool_call>", b"</think>", b"", b'{"a"']
VOCAB = 288  # of the model: the rest is padding
SPECIAL = [EOS, CALL, CLOSE, 259]
WORDS = VOCAB // 32
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine() -> LLGuidance:
    return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))


def allowed(matcher: Matcher) -> set[int]:
    mask = np.full(WORDS, -1, dtype=np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(engine: LLGuidance, grammar: Grammar, *parts: str | int) -> bool:
    """Whether text, with special tokens by id, is a whole output; every token must be allowed by the mask before it."""
    matcher = engine.compile(grammar).matcher()
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    for token in tokens:
        if token not in allowed(matcher):
            return False
        matcher.consume(token)
    return EOS in allowed(matcher)


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
    llama = demand_calls(TOOLS, "llama3", many=True)
    assert accepts(engine, llama, '{"name": "f", "parameters": {"a": 22}}; {"name": "g", "parameters": {}}')


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


def test_text_that_begins_like_a_call_is_one_in_the_llama_format(engine: LLGuidance) -> None:
    grammar = allow_calls([*TOOLS, Tool("a-b.c", {})], "llama3", None, many=True)
    for free in ("", "hello", "[1]", '{"answer": 42, "name": "f"}', ' {"name": "Bob"}', '{"type": "x"}', "{"):
        assert accepts(engine, grammar, free), free
    for call in ('{"name": "f", "parameters": {"a": 1}}', '<|python_tag|>{"name": "a-b.c", "parameters": {}}'):
        assert accepts(engine, grammar, call), call
    for wrong in ('{"name": "f", "parameters": {"a": 2}}', '{"name": "f"}', '{"type":"function", ', "<|python_tag|>x"):
        assert not accepts(engine, grammar, wrong), wrong


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@pytest.mark.parametrize("special", [True, False])
def test_thoughts_may_write_of_calls_as_they_like(form: ToolFormat, special: bool) -> None:
    context = GrammarContext(VOCAB, PIECES, [EOS, CLOSE], [EOS]) if special else GrammarContext(257, BYTES, [], [256])
    engine, close = LLGuidance(context), CLOSE if special else "</think>"
    free = allow_calls(TOOLS, form, None, many=True)
    call = "<tool_call>" + F if form == "hermes" else '{"name": "f", "parameters": {"a": 1}}'
    wrong = call.replace("1", "2")
    thinking: Literal["open", "optional"]
    for thinking, opening in (("open", ""), ("optional", "<think>")):
        grammar = Grammar(free.kind, free.source, thinking=thinking)
        assert accepts(engine, grammar, opening, "<tool_call>, ", wrong, close, "text")
        assert accepts(engine, grammar, opening, "hm", close, call)
        assert not accepts(engine, grammar, opening, "hm", close, wrong)
    assert accepts(engine, Grammar(free.kind, free.source, thinking="optional"), call)


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@pytest.mark.parametrize("answer", [Grammar("json_schema", '{"type": "array"}'), Grammar("ebnf", 'root ::= "[1]"')])
def test_calls_or_an_answer_that_has_a_grammar_of_its_own(
    engine: LLGuidance, form: ToolFormat, answer: Grammar
) -> None:
    grammar = allow_calls(TOOLS, form, answer, many=True)
    call: tuple[str | int, ...] = (CALL, F) if form == "hermes" else ('{"name": "f", "parameters": {"a": 22}}',)
    assert accepts(engine, grammar, "[1]")
    assert accepts(engine, grammar, *call)
    assert not accepts(engine, grammar, "text")
    assert not accepts(engine, grammar, "[1]", *call)
    thinking = Grammar(grammar.kind, grammar.source, thinking="open")
    assert accepts(engine, thinking, "hm, <tool_call>?", CLOSE, "\n\n", *call)
    assert accepts(engine, thinking, "hm", CLOSE, "[1]")


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
    "keyword that is not known": Grammar("json_schema", '{"type": "object", "dependentSchemas": {"a": {}}}'),
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
LIMIT_S = 5.0  # generous for a shared machine: the slowest takes one second alone


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(engine: LLGuidance, name: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError) as refused:
        engine.compile(REFUSED[name])
    assert refused.value.status == 400
    assert len(refused.value.message) < 400
    assert time.perf_counter() - started < LIMIT_S


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_bounded_time(engine: LLGuidance, name: str) -> None:
    """Compiled or refused, and then followed for a while: each step is bounded, and the end may be a failure."""
    started = time.perf_counter()
    try:
        matcher = engine.compile(BOMBS[name]).matcher()
        for _ in range(30):
            matcher.consume(min(allowed(matcher) - {EOS}, default=EOS))
    except (RequestError, GrammarFailure):
        pass
    assert time.perf_counter() - started < LIMIT_S


def test_compiled_grammars_are_kept_within_a_size() -> None:
    built = []

    def new_engine() -> LLGuidance:
        built.append(1)
        return LLGuidance(GrammarContext(VOCAB, PIECES, SPECIAL, [EOS]))

    grammars = Grammars(new_engine, max_cache_bytes=300_000)
    for number in range(40):
        grammars.check(Grammar("regex", f"a{number}"))
        assert grammars.num_cached_bytes <= 300_000
    assert built == [1]
    assert grammars.matcher(Grammar("regex", "a39")) is not grammars.matcher(Grammar("regex", "a39"))
