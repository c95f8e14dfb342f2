"""A GGUF file's tokenizer encodes as the one that it was written from, and as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GemmaTokenizer

from engine.checkpoints.gguf_header import GGUFHeader
from engine.checkpoints.gguf_tokenizer import SPLITS, tokenizer_files
from engine.types.errors import WeightsError
from tests.text.specimens import CORPUS, byte_level, gemma, llama2

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")

TEXTS = [*CORPUS, "def f(x):\n\treturn x  + 1\n", "I'm HERE, they'LL go\r\n\r\n done", "abc1234567 ٣٤٥ ½", "x" * 40]


def _write(path: Path, tokenizer: Tokenizer, **changes: Any) -> GGUFHeader:
    """Write a file with a tokenizer and no tensor.  changes: metadata below tokenizer.ggml; None leaves a key out."""
    stored = json.loads(tokenizer.to_str())
    added = {one["content"]: 3 if one["special"] else 4 for one in stored["added_tokens"]}
    vocab = {**stored["model"]["vocab"], **{one["content"]: one["id"] for one in stored["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]]
    is_bytes = not stored["model"]["byte_fallback"]
    facts: dict[str, Any] = {
        "model": "gpt2" if is_bytes else "llama",
        "pre": "gpt-2" if is_bytes else "default",
        "tokens": tokens,
        "token_type": [added.get(one, 6 if one.startswith("<0x") else 1) for one in tokens],
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        "unknown_token_id": vocab["<unk>"],
    }
    if is_bytes:
        facts["merges"] = merges
    else:  # a score is the place of the token's merge
        ranks = {one.replace(" ", ""): -float(rank) for rank, one in enumerate(merges)}
        facts["scores"] = [ranks.get(one, -1e6) for one in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    adders = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
    for key, value in (facts | changes).items():
        if value is not None:
            name = "tokenizer." + ("" if key == "chat_template" else "ggml.")
            adders[type(value)](name + key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFHeader(path)


def _read(header: GGUFHeader) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files(header)["tokenizer.json"])


def _ids(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return encoded if isinstance(encoded, list) else encoded.ids


@pytest.mark.parametrize("make", [byte_level, llama2])
def test_texts_are_encoded_as_by_the_original_and_by_transformers(make: Any, tmp_path: Path) -> None:
    original = make()
    header = _write(tmp_path / "model.gguf", original)
    ours, theirs = _read(header), AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (*TEXTS, "two words and Ġx", "</s> in between"):
        ids = original.encode(text).ids
        assert _ids(ours, text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    for text in TEXTS:
        assert _ids(ours, text) == _ids(theirs, text)


def test_texts_are_encoded_as_by_gemma_4(tmp_path: Path) -> None:
    """Its file has merges, and early files deny the token that all texts begin with."""
    stored = json.loads(gemma().to_str())["model"]
    original = GemmaTokenizer(
        vocab=stored["vocab"], merges=[tuple(one) for one in stored["merges"]], bos_token="<s>", eos_token="</s>"
    )
    merges = [" ".join(one) for one in stored["merges"]]
    changes = {"model": "gemma4", "merges": merges, "add_space_prefix": False, "add_bos_token": False, "pre": None}
    ours = _read(_write(tmp_path / "model.gguf", gemma(), **changes))
    for text in (*TEXTS, "  two\n\n\nlines "):
        ids = original.encode(text, add_special_tokens=False)
        assert _ids(ours, text) == [1, *ids]
        assert ours.decode(ids) == original.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35"])
def test_texts_are_split_as_by_transformers(pre: str, tmp_path: Path) -> None:
    header = _write(tmp_path / "model.gguf", byte_level(), pre=pre, add_bos_token=False)
    ours, theirs = _read(header), AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        ours_cut, theirs_cut = ([piece for piece, _ in one.pre_tokenizer.pre_tokenize_str(text)]
                                for one in (ours, theirs.backend_tokenizer))  # fmt: skip
        assert ours_cut == theirs_cut


@pytest.mark.parametrize("pre", SPLITS)
def test_no_character_of_a_text_is_lost_by_splitting(pre: str, tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", byte_level(), pre=pre, add_bos_token=False))
    for text in TEXTS:
        text = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.decode(_ids(ours, text)) == text


def test_every_digit_is_a_piece_for_smollm(tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", byte_level(), pre="smollm"))
    pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("in 2024 x")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", "Ġx"]


def test_digits_and_ideographs_are_pieces_for_deepseek(tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", byte_level(), pre="deepseek-v3"))
    text = "abc12345 中文字x!foo"
    pieces = [text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["abc", "123", "45", " ", "中文字", "x", "!foo"]


@pytest.mark.parametrize("pre", ["glm4", "glm5", "llama-bpe"])
def test_whole_words_that_merges_do_not_reach_are_taken(pre: str, tmp_path: Path) -> None:
    """GLM's texts begin with no token, though its words are taken whole, as Llama's are."""
    content = json.loads(tokenizer_files(_write(tmp_path / "model.gguf", byte_level(), pre=pre))["tokenizer.json"])
    assert content["model"]["ignore_merges"]
    assert ("<s>" in json.dumps(content["post_processor"])) == (pre == "llama-bpe")


def test_kimi_splits_as_its_own_pattern_does(tmp_path: Path) -> None:
    """tokenization_kimi.py has this pattern.  Ideographs are pieces of their own, and a capital begins one."""
    ours = _read(_write(tmp_path / "model.gguf", byte_level(), pre="kimi-k2", add_bos_token=False))
    pattern = "|".join(
        [
            r"""[\p{Han}]+""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
            r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
            r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    )
    for text in (*TEXTS, "中文字abcDef漢字 12345 ひらがなカタカナ x中y", "HTTPServer's Ünï"):
        pieces = [text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == regex.findall(pattern, text, regex.VERSION1)
    assert regex.findall(pattern, "中x", regex.VERSION1) == ["中", "x"]


def test_composed_characters_are_read_alike(tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", byte_level(), pre="qwen2"))
    assert _ids(ours, "cafe\u0301") == _ids(ours, "café")


@pytest.mark.parametrize(
    ("make", "changes", "before", "after"),
    [
        (byte_level, {}, [], []),
        (byte_level, {"pre": "llama-bpe"}, [1], []),
        (byte_level, {"pre": "llama-bpe", "add_bos_token": False}, [], []),
        (byte_level, {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        (byte_level, {"add_bos_token": True, "bos_token_id": None}, [], []),
        (byte_level, {"add_bos_token": True, "bos_token_id": 1 << 20}, [], []),
        (llama2, {}, [1], []),
        (llama2, {"add_bos_token": False}, [], []),
    ],
)
def test_tokens_around_a_text(make: Any, changes: dict, before: list[int], after: list[int], tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", make(), **changes))
    plain = ours.encode("def", add_special_tokens=False).ids
    assert ours.encode("def").ids == [*before, *plain, *after]


def test_without_a_space_before_a_text_none_is_taken_away(tmp_path: Path) -> None:
    ours = _read(_write(tmp_path / "model.gguf", llama2(), add_space_prefix=False, add_bos_token=False))
    for text in ("def", " def"):
        assert ours.decode(_ids(ours, text)) == text


def test_the_template_and_the_named_tokens_have_files(tmp_path: Path) -> None:
    files = tokenizer_files(_write(tmp_path / "model.gguf", byte_level(), chat_template="{{ bos_token }} ä"))
    assert files["chat_template.jinja"].decode() == "{{ bos_token }} ä"
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert json.loads(files["tokenizer_config.json"]) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', expected one of gpt2, llama, gemma4, with its tokens"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"model": ["gpt2"]}, r"tokenizer.ggml.model is \['gpt2'\]"),
        ({"tokens": None}, "with its tokens; set model.tokenizer to a directory"),
        ({"tokens": [1, 2]}, "with its tokens"),
        (
            {"pre": "unheard-of"},
            "tokenizer.ggml.pre is 'unheard-of', expected one of default, gpt-2, .*; set model",
        ),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"model": "gemma4", "merges": None}, "tokenizer.ggml.merges is missing, or no list of texts"),
        ({"model": "llama"}, "tokenizer.ggml.scores is no list of 403 numbers"),
        ({"model": "llama", "tokens": ["ab" * 1000], "scores": [0.0]}, "a token has 2000 characters, expected 1024 at"),
    ],
)
def test_what_is_not_read_is_refused_with_what_is_there(changes: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"model\.gguf: .*{said}"):
        tokenizer_files(_write(tmp_path / "model.gguf", byte_level(), **changes))
