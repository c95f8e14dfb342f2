"""Endings: the values in an output's text, and how much of the text is kept."""

from engine.plugins.grammar.checks import Judge
from engine.plugins.grammar.endings import Ending

JUDGE = Judge({"uniqueItems": True})


def test_free_text_is_read_once() -> None:
    """The part that may be the beginning of a call is kept."""
    ending = Ending([bytes([byte]) for byte in range(256)], {"<f>": JUDGE}, None, "none")
    for byte in ("é" * 1000 + "<f").encode():
        ending.consume(byte)
        assert not ending.fault()[0]
        assert len(ending._text) < 3
    for byte in b">[1, 1]":
        ending.consume(byte)
    fault, is_final = ending.fault()
    assert fault.endswith("the value: uniqueItems")
    assert is_final


def test_text_that_quotes_the_beginning_of_a_call_hides_none() -> None:
    for text in ("<f> is a call: <f>[1, 1]", "<f> <g> <f>[1, 1]", "<f>[1]<f><f>[2, 2]"):
        ending = Ending([text.encode()], {"<f>": JUDGE, "<g>": None}, None, "none")
        ending.consume(0)
        assert ending.fault() == ("the output does not follow the schema: the value: uniqueItems", True)


def test_an_answer_that_quotes_a_call_is_an_answer() -> None:
    for text in ('["<f>", 1, 1]', '["<f>[2]", 1, 1]'):
        ending = Ending([text.encode()], {"<f>": JUDGE}, JUDGE, "none")
        ending.consume(0)
        assert ending.fault() == ("the output does not follow the schema: the value: uniqueItems", False)
    ending = Ending([b'["<f>[2, 2]"]'], {"<f>": JUDGE}, JUDGE, "none")
    ending.consume(0)
    assert not ending.fault()[0]


def test_a_call_that_is_free_is_no_answer() -> None:
    """A call of llama3 is JSON, as the answer is."""
    begin = '{"name": "f", "parameters": '
    ending = Ending([f"{begin}{{}}}}".encode()], {begin: None}, Judge({"required": ["x"]}), "none")
    ending.consume(0)
    assert not ending.fault()[0]


def test_thoughts_that_may_still_begin_are_kept() -> None:
    ending = Ending([bytes([byte]) for byte in range(256)], {"<f>": JUDGE}, None, "optional")
    for byte in b" <think>":
        ending.consume(byte)
        assert not ending.fault()[0]
    for byte in b"<f>[1, 1] </think> <f>[1, 2]":
        ending.consume(byte)
    assert not ending.fault()[0]
