"""A checkpoint without tokenizer.json: what transformers makes of its other files is used, and kept."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.formats import tokenizer_json
from engine.text import conversion
from engine.text.codec import TextCodec
from engine.text.files import TokenizerFiles
from engine.types.errors import WeightsError

TOKENS = ["<|endoftext|>", *"helo wrd", "he", "ll", "Ġ"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """GPT-2's older files: a vocabulary and merges."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(TOKENS)}))
    (directory / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return directory


def test_it_is_converted_once_and_again_when_a_file_changes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    codec = TextCodec.load(checkpoint)
    ids = [TOKENS.index(token) for token in ("he", "ll", "o")]
    assert list(codec.encode("hello")) == ids
    assert codec.decode(ids) == "hello"

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(conversion.subprocess, "run", called)
    assert TokenizerFiles(checkpoint).tokenizer.encode("hello").ids == ids
    (checkpoint / "merges.txt").write_text("#version: 0.2\nh e\n")
    with pytest.raises(AssertionError, match="was asked"):
        TokenizerFiles(checkpoint)


def test_what_transformers_cannot_convert_is_said_with_its_reason(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    said = "Traceback ...\nValueError: `tiktoken` is required to read a `tiktoken` file."
    ran: list[list[str]] = []

    def failing(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=1, stderr=said)

    monkeypatch.setattr(conversion.subprocess, "run", failing)
    with pytest.raises(WeightsError, match=r"tokenizer\.model: transformers cannot convert it: ValueError: `tiktoken`"):
        TokenizerFiles(tmp_path)
    assert ran[0][-2] == str(tmp_path)
    assert not list(cache.rglob("*/*/*")), "nothing half made is left"

    def endless(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(conversion.subprocess, "run", endless)
    with pytest.raises(WeightsError, match="not converted it within 300 s"):
        TokenizerFiles(tmp_path)
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"transformers must convert it: pip install 'callboard\[transformers\]'"):
        TokenizerFiles(tmp_path)


def test_code_that_a_checkpoint_brings_along_is_not_run(checkpoint: Path, tmp_path: Path):
    (checkpoint / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", null]}}')
    (checkpoint / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(SystemExit, match="it needs code of its own, which is not run"):
        tokenizer_json.main(checkpoint, tmp_path)


def test_without_any_of_its_files_the_error_is_of_tokenizer_json(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no such file; set model\.tokenizer to a directory"):
        TokenizerFiles(tmp_path)
