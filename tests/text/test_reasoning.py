"""Thoughts and answers: told apart whatever pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.reasoning import CLOSE, OPEN, THINK, ReasoningSplitter, Thinking

PIECES = st.sampled_from([OPEN, CLOSE, "<", "think", "</", ">", "a", "\n", " ", "  \n", "word", "<thin", "é"])


def split(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    "thinking, text, thoughts, answer",
    [
        ("open", "hm\n</think>\n\nyes", "hm", "yes"),
        ("open", "never ends", "never ends", ""),
        ("optional", "<think>hm</think>yes", "hm", "yes"),
        ("optional", "\n <think>hm</think>yes", "hm", "yes"),
        ("optional", "yes <think>", "", "yes <think>"),
        ("optional", "<thing>", "", "<thing>"),
        ("optional", "<thi", "", "<thi"),
        ("optional", "<think>a</think>b</think>c", "a", "b</think>c"),
        ("none", "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_what_is_thought_and_what_is_answered(thinking: Thinking, text: str, thoughts: str, answer: str) -> None:
    assert split(thinking, [text]) == (thoughts, answer)


@given(st.sampled_from(["open", "optional", "none"]), st.lists(PIECES, max_size=12), st.data())
def test_pieces_make_no_difference(thinking: Thinking, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(thinking, cut) == split(thinking, [text]) == split(thinking, list(text))


@given(st.sampled_from(["open", "optional", "none"]), st.lists(PIECES, max_size=12))
def test_no_word_is_lost(thinking: Thinking, pieces: list[str]) -> None:
    text = "".join(pieces)
    joined = "".join(split(thinking, [text]))
    assert joined.count("word") == text.count("word")
    assert joined.count("é") == text.count("é")


def test_what_is_certain_is_told_at_once() -> None:
    splitter = ReasoningSplitter("open")
    assert splitter.push("so ") == ("so", "")
    assert splitter.push("far") == (" far", "")
    assert splitter.push("</") == ("", "")
    assert splitter.push("b>") == ("</b>", "")
    assert splitter.push("</think>yes") == ("", "yes")


@pytest.mark.parametrize(
    "prompt, thinking",
    [
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "none"),
        ("<|im_start|>assistant\n", "optional"),
        ("<think>old</think>answer<|im_end|>\n<|im_start|>assistant\n", "optional"),
    ],
)
def test_a_prompt_says_where_it_leaves_the_model(prompt: str, thinking: Thinking) -> None:
    assert THINK.thinking_at_end(prompt) == thinking
