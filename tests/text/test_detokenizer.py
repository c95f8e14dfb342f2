"""However tokens arrive, the text is the whole text, and never half a character."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text.codec import Detokenizer
from engine.text.vocabulary import Vocabulary
from tests.text.specimens import CORPUS, MAKERS

BYTE_KINDS = ("byte_level", "llama2", "gemma")
TEXTS = [
    *CORPUS,
    "  two  spaces ",
    "日本語",
    "e\u0301\u0301 a\u0308",
    "नमस्ते",
    "🇩🇪🏳️‍🌈",
    "\x00\x7f\n\r\t",
    "\ufffd ok",
    "x" * 50,
]
fixtures_are_read_only = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def vocabulary_of(codec) -> Vocabulary:
    return codec.vocabulary


def byte_ids(tokenizer, kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    if kind == "byte_level":
        alphabet = {}
        extra = 0
        for byte in range(256):
            if byte in {*range(33, 127), *range(161, 173), *range(174, 256)}:
                alphabet[byte] = chr(byte)
            else:
                alphabet[byte], extra = chr(256 + extra), extra + 1
        return [tokenizer.token_to_id(alphabet[byte]) for byte in data]
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


def in_groups(detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    shown = [detokenizer.push(token_ids[begin:end]) for begin, end in pairwise(edges)]
    return [*shown, detokenizer.finish()]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_whole_text_is_the_tokenizers_own(codecs_by_kind, tokenizers_by_kind, kind, text, skip):
    tokenizer, codec = tokenizers_by_kind[kind], codecs_by_kind[kind]
    token_ids = tokenizer.encode(text).ids
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert codec.decode(token_ids, skip_special_tokens=skip) == expected
    detokenizer = Detokenizer(vocabulary_of(codec), skip_special_tokens=skip)
    assert "".join(in_groups(detokenizer, token_ids, list(range(len(token_ids))))) == expected


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_one_token_per_byte_never_shows_half_a_character(codecs_by_kind, tokenizers_by_kind, kind, text):
    token_ids = byte_ids(tokenizers_by_kind[kind], kind, text.encode())
    detokenizer = Detokenizer(vocabulary_of(codecs_by_kind[kind]), skip_special_tokens=True, prompt_ids=[5])
    shown, seen = "", b""
    for token_id, byte in zip(token_ids, text.encode(), strict=True):
        shown += detokenizer.push([token_id])
        seen += bytes([byte])
        # Everything complete is shown at once, and nothing else.
        assert shown == seen.decode(errors="ignore")
    assert detokenizer.finish() == ""
    assert shown == text


@pytest.mark.reliability("U2", "text cut into tokens and groups anywhere, also within a character or a stop string")
@pytest.mark.parametrize("kind", MAKERS)
@fixtures_are_read_only
@given(data=st.data())
def test_any_tokens_in_any_groups_give_the_same_text(codecs_by_kind, tokenizers_by_kind, kind, data):
    codec, tokenizer = codecs_by_kind[kind], tokenizers_by_kind[kind]
    # Ids past the vocabulary are what a model with a padded embedding can produce.
    token_ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=10))
    skip = data.draw(st.booleans())
    whole = codec.decode(token_ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(vocabulary_of(codec), skip_special_tokens=skip)
    assert "".join(in_groups(detokenizer, token_ids, cuts)) == whole
    theirs = tokenizer.decode([i for i in token_ids if i < codec.vocab_size], skip_special_tokens=skip)
    if kind == "byte_level" or "\ufffd" not in theirs:
        assert whole == theirs


@pytest.mark.reliability("U2", "text cut into tokens and groups anywhere, also within a character or a stop string")
@fixtures_are_read_only
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8), kind=st.sampled_from(BYTE_KINDS))
def test_random_bytes_become_text_as_by_the_unicode_standard(codecs_by_kind, tokenizers_by_kind, data, cuts, kind):
    token_ids = byte_ids(tokenizers_by_kind[kind], kind, data)
    detokenizer = Detokenizer(vocabulary_of(codecs_by_kind[kind]), skip_special_tokens=True, prompt_ids=[5])
    assert "".join(in_groups(detokenizer, token_ids, cuts)) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_an_incomplete_end_is_flushed_as_one_replacement_character(codecs_by_kind, tokenizers_by_kind, kind):
    token_ids = byte_ids(tokenizers_by_kind[kind], kind, "a🙂".encode()[:-1])
    detokenizer = Detokenizer(vocabulary_of(codecs_by_kind[kind]), skip_special_tokens=True)
    assert detokenizer.push(token_ids) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_valid_characters_before_invalid_byte_tokens_are_kept(codecs_by_kind, tokenizers_by_kind):
    """The one place where the text differs from the tokenizer's own, which replaces the whole run."""
    token_ids = byte_ids(tokenizers_by_kind["llama2"], "llama2", "你".encode() + b"\xff")
    assert tokenizers_by_kind["llama2"].decode(token_ids) == "\ufffd" * 4
    assert codecs_by_kind["llama2"].decode(token_ids) == "你\ufffd"


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("prompt", ["The quick", "The quick ", "Zoë", "def add(a, b):\n"])
@pytest.mark.parametrize("output", [" brown fox", "brown", " ", "  return", "🙂 ok"])
def test_prompt_and_output_join_as_if_they_were_one(codecs_by_kind, tokenizers_by_kind, kind, prompt, output):
    tokenizer, codec = tokenizers_by_kind[kind], codecs_by_kind[kind]
    prompt_ids = tokenizer.encode(prompt).ids
    output_ids = tokenizer.encode(output, add_special_tokens=False).ids
    detokenizer = Detokenizer(vocabulary_of(codec), skip_special_tokens=True, prompt_ids=np.array(prompt_ids, np.int32))
    shown = "".join(in_groups(detokenizer, output_ids, [1, 2, 3]))
    assert codec.decode(prompt_ids) + shown == tokenizer.decode(prompt_ids + output_ids)


def test_a_leading_space_is_the_texts_own_unless_nothing_is_before_it(codecs_by_kind, tokenizers_by_kind):
    tokenizer, vocabulary = tokenizers_by_kind["llama2"], vocabulary_of(codecs_by_kind["llama2"])
    the = tokenizer.encode("The", add_special_tokens=False).ids
    assert tokenizer.id_to_token(the[0]).startswith("▁")
    bos = tokenizer.token_to_id("<s>")
    for prompt_ids, skip, expected in (
        ([], True, "The"),
        ([bos], True, "The"),
        ([bos], False, " The"),
        ([bos, the[0]], True, " The"),
    ):
        detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip, prompt_ids=prompt_ids)
        assert detokenizer.push(the) == expected


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("num_bytes_in_prompt", [1, 2, 3, 4])
def test_a_character_begun_by_the_prompt_is_completed_by_the_output(
    codecs_by_kind, tokenizers_by_kind, kind, num_bytes_in_prompt
):
    token_ids = byte_ids(tokenizers_by_kind[kind], kind, "日🙂".encode())
    at = 3 + num_bytes_in_prompt
    detokenizer = Detokenizer(vocabulary_of(codecs_by_kind[kind]), skip_special_tokens=True, prompt_ids=token_ids[:at])
    assert detokenizer.push(token_ids[at:]) == ("🙂" if num_bytes_in_prompt < 4 else "")
    assert detokenizer.finish() == ""


def test_an_incomplete_prompt_without_output_shows_nothing(codecs_by_kind, tokenizers_by_kind):
    token_ids = byte_ids(tokenizers_by_kind["byte_level"], "byte_level", "🙂".encode()[:2])
    bos = tokenizers_by_kind["byte_level"].token_to_id("<s>")
    detokenizer = Detokenizer(
        vocabulary_of(codecs_by_kind["byte_level"]), skip_special_tokens=True, prompt_ids=token_ids
    )
    assert detokenizer.push([bos]) + detokenizer.finish() == ""


def test_special_tokens_are_skipped_or_named(codecs_by_kind, tokenizers_by_kind):
    tokenizer, codec = tokenizers_by_kind["byte_level"], codecs_by_kind["byte_level"]
    token_ids = [1, *tokenizer.encode("fox").ids, 2, 10_000]
    assert codec.decode(token_ids) == "fox"
    assert codec.decode(token_ids, skip_special_tokens=False) == "<s>fox</s>"
