"""Calls in an output: found whatever pieces it comes in, and text is never lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.tool_calls import ToolCallParser, text_and_calls
from engine.text.tool_format import Tool, explanation
from tests.plugins.model_outputs import tool_format

Read = tuple[str, list[tuple[str, str]]]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a}b\\"{", "y": [1, {"z": 2}]}}\n</tool_call>'
ARGUMENTS = '{"x": "a}b\\"{", "y": [1, {"z": 2}]}'

HERMES: list[tuple[str, Read]] = [
    ("hello", ("hello", [])),
    (CALL, ("", [("f", ARGUMENTS)])),
    (f"Sure.\n{CALL}\n{CALL}\n", ("Sure.\n", [("f", ARGUMENTS)] * 2)),
    ('<tool_call>{"arguments": {"q": 1}, "name": "g"}</tool_call> bye', ("bye", [("g", '{"q": 1}')])),
    ('<tool_call>{"name": "g"}</tool_call>', ("", [("g", "{}")])),
    ('<tool_call>{"name": "g", "arguments": null}</tool_call>', ("", [("g", "{}")])),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', ("", [("f", "{}"), ("g", "{}")])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>tail', ("tail", [("f", '{"a": 1}')])),
    ("<tool_call>nonsense</tool_call> x", ("<tool_call>nonsense</tool_call> x", [])),
    ('<tool_call>["f"]</tool_call>', ('<tool_call>["f"]</tool_call>', [])),
    ('<tool_call>{"na', ('<tool_call>{"na', [])),
    ("a < b <tool_", ("a < b <tool_", [])),
    ("  \n", ("  \n", [])),
]
LLAMA: list[tuple[str, Read]] = [
    ('{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
     ("", [("f", "{}"), ("g", '{"y": 2}')])),
    ('\n {"name": "f", "parameters": {"x": "}"}} and more', ("and more", [("f", '{"x": "}"}')])),
    ('{"name": "unknown", "parameters": {}} tail', ('{"name": "unknown", "parameters": {}} tail', [])),
    ('{"answer": 42, "name": "f"}', ('{"answer": 42, "name": "f"}', [])),
    ('hello {"name": "f"}', ('hello {"name": "f"}', [])),
    ('{"name": "f', ('{"name": "f', [])),
    ("<|pyth", ("<|pyth", [])),
]  # fmt: skip


# Where a grammar holds: only what it takes for a call is one.
EXACT: list[tuple[str, Read]] = [
    LLAMA[0],
    ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
     ("", [("f", "{}"), ("g", '{"y": 2}')])),
    *((text, (text, [])) for text in (
        '{"id": 1, "name": "f", "parameters": {}}',
        '{"type": "function", "name": "f", "parameters": {}}',
        '{"name": "\\u0066", "parameters": {}}',
        '{,"name": "f", "parameters": {}}',
        '{"name":"f", "parameters": {}}',
        '{ "name": "f", "parameters": {}}',
        '{"parameters": {}, "name": "f"}',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f',
    )),
]  # fmt: skip


def new_parser(
    form: str, names: set[str], max_calls: int | None = None, *, exact: bool = False, forced: bool = False
) -> ToolCallParser:
    tools = [Tool(name, {}) for name in sorted(names)]
    return ToolCallParser(tool_format(form).parser(tools, exact=exact), max_calls, forced=forced)


def read(form: str, pieces: list[str], max_calls: int | None = None, *, exact: bool = False) -> Read:
    parser = new_parser(form, {"f", "g"}, max_calls, exact=exact)
    content = ""
    calls: dict[int, list[str]] = {}
    for text, found in map(text_and_calls, [*map(parser.push, pieces), parser.finish()]):
        content += text
        for piece in found:
            if piece.name is not None:
                assert piece.index == len(calls), "calls are numbered as they come, and named once"
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("text, expected", HERMES)
def test_hermes(text: str, expected: Read) -> None:
    assert read("hermes", [text]) == expected
    assert read("hermes", list(text)) == expected


@pytest.mark.parametrize("text, expected", LLAMA)
def test_llama(text: str, expected: Read) -> None:
    assert read("llama3_json", [text]) == expected
    assert read("llama3_json", list(text)) == expected


@pytest.mark.parametrize("text, expected", EXACT)
def test_where_a_grammar_holds_nothing_is_forgiven(text: str, expected: Read) -> None:
    assert read("llama3_json", [text], exact=True) == expected
    assert read("llama3_json", list(text), exact=True) == expected


TEXTS = {"hermes": [text for text, _ in HERMES], "llama3_json": [text for text, _ in LLAMA]}
CALL_SCRAPS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"',
    ', "arguments": {"a": 1}',
    ', "parameters": {',
    "<|python_tag|>",
]
SCRAPS = st.sampled_from([*CALL_SCRAPS, *'}"{\n;x<\\,:', "[1]", "null"])


@given(st.sampled_from(["hermes", "llama3_json"]), st.booleans(), st.lists(SCRAPS, max_size=14), st.data())
def test_pieces_make_no_difference(form: str, exact: bool, scraps: list[str], data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["".join(scraps), *TEXTS[form]]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, [text], exact=exact)
    assert read(form, cut, exact=exact) == whole == read(form, list(text), exact=exact)


VALUES = st.text(max_size=9) | st.integers() | st.lists(st.booleans())


@given(
    st.sampled_from(["hermes", "llama3_json"]),
    st.lists(
        st.tuples(
            st.sampled_from("fg"),
            st.dictionaries(
                st.text(max_size=5), st.text(max_size=9) | st.integers() | st.lists(st.booleans()), max_size=3
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_what_is_written_is_read(form: str, calls: list[tuple[str, dict[str, object]]], size: int) -> None:
    key = "arguments" if form == "hermes" else "parameters"
    bodies = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies) if form == "hermes" else "; ".join(bodies)
    content, found = read(form, [text[at : at + size] for at in range(0, len(text), size)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_are_told_as_they_come() -> None:
    parser = new_parser("hermes", {"f"})
    (first,) = parser.push('<tool_call>{"name": "f", "argu')
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    pieces = [piece for text in ('ments": {"x"', ": 1", "}}") for piece in parser.push(text)]
    assert [piece.arguments for piece in pieces] == ['{"x"', ": 1", "}"]


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_what_is_cut_off_before_a_name_is_no_text_where_a_call_must_come(form: str) -> None:
    opening, key = ("<tool_call>\n", "arguments") if form == "hermes" else ("", "parameters")
    whole = f'{opening}{{"name": "f", "{key}": {{"x": 1}}}}' + ("\n</tool_call>\n" if opening else "; ")
    for before in (0, 1):
        for end in range(whole.index('"f"') + len('"f"')):
            parser = new_parser(form, {"f", "g"}, exact=True, forced=True)
            content, _ = text_and_calls([*parser.push(whole * before + whole[:end]), *parser.finish()])
            assert (content, parser.num_calls, parser.cut_off) == ("", before, False), whole[:end]


def test_thoughts_in_front_of_a_call_that_must_come_stay() -> None:
    parser = new_parser("hermes", {"f"}, exact=True, forced=True)
    assert [*parser.push("<think>a < b</think>\n<tool_ca"), *parser.finish()] == ["<think>a < b</think>\n"]


def test_text_and_calls_keep_their_order() -> None:
    parser = new_parser("hermes", {"f"})
    parts = [*parser.push(f"before{CALL}behind"), *parser.finish()]
    assert [part if isinstance(part, str) else part.name for part in parts] == ["before", "f", None, "behind"]


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_call_that_is_not_whole_is_told(form: str) -> None:
    def cut_off(text: str, max_calls: int | None = None) -> bool:
        parser = new_parser(form, {"f"}, max_calls)
        parser.push(text)
        parser.finish()
        return parser.cut_off

    key = "arguments" if form == "hermes" else "parameters"
    opening = "<tool_call>" if form == "hermes" else ""
    whole = opening + '{"name": "f", "' + key + '": {"x": 1}}'
    assert not cut_off(whole)
    assert cut_off(whole[:-1])
    assert cut_off(whole[:-4])
    assert cut_off(whole + "; "[form == "hermes" :] + whole[:-1])
    assert not cut_off(whole + whole[:-1], max_calls=1), "nobody has heard of the second one"


def test_calls_beyond_the_most_are_dropped() -> None:
    assert read("hermes", [f"{CALL}{CALL}"], max_calls=1) == ("", [("f", ARGUMENTS)])


def test_a_megabyte_of_broken_call_takes_linear_time() -> None:
    parser = new_parser("hermes", {"f"})
    parser.push("<tool_call>{")
    for _ in range(20_000):
        parser.push('"k": "' + "x" * 40 + '", ')
    text, calls = text_and_calls(parser.finish())
    assert len(text) == 12 + 20_000 * 49
    assert calls == []


def test_an_explanation_names_every_function() -> None:
    text = explanation(
        [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
    )
    assert text.count('"name":"f"') == text.count('"name":"g"') == 1
