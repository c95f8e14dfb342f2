"""The tokenizers of published models: texts, streams and chats are those of tokenizers and transformers."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.codec import Detokenizer, TextCodec
from engine.types.prompt import ChatOptions, ChatTurn
from tests.real import vocabularies

pytestmark = pytest.mark.slow

HELD = (Path(__file__).parent / "held.txt").read_text()
TEXTS = [
    "The quick brown fox doesn't jump.  It   sleeps\n\n\tand dreams.",
    "def add(a: int, b: int) -> int:\n    return a + b  # 100 %\r\n",
    "Zoë naïvely cafés — “quotes” … e\u0301\u0301 a\u0308 \ufffd \x00\x7f",
    "你好，世界。今天天气很好。日本語のテキスト。안녕하세요",
    "नमस्ते दुनिया مرحبا بالعالم שלום",
    "🐈‍⬛🙂👩‍👩‍👧🇩🇪🏳️‍🌈 é",
    "<|im_start|>user <s> </s> <|eot_id|> <bos> [INST] <|start|>",
    " leading and trailing ",
    "x" * 200,
    "0123456789 3.14159 1,000,000 0x1F",
    HELD[:1500],
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a <city> & its "mood" é',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS = {
    "question": [ChatTurn("user", "Hello <b>you</b> & “quotes” 🙂")],
    "three": [ChatTurn("user", " a "), ChatTurn("assistant", "b\n"), ChatTurn("user", "c")],
    "with a system": [
        ChatTurn("system", "Be brief."),
        ChatTurn("user", "a"),
        ChatTurn("assistant", "b"),
        ChatTurn("user", ""),
    ],
}


@pytest.fixture(scope="module", params=vocabularies.SHA512)
def folder(request: pytest.FixtureRequest) -> Path:
    """A published model's tokenizer files; tests that need them are skipped where they are not."""
    if not (path := vocabularies.path(request.param)).is_dir():
        pytest.skip("the published tokenizers are not here: make real")
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.load(folder)


def test_texts_and_streams_are_those_of_tokenizers(reference: Tokenizer, codec: TextCodec) -> None:
    dice, vocabulary = Random(7), codec.vocabulary
    random_ids = [[dice.randrange(reference.get_vocab_size()) for _ in range(60)] for _ in range(8)]
    encoded = [reference.encode(text).ids for text in TEXTS]
    for text, token_ids in zip(TEXTS, encoded, strict=True):
        assert codec.encode(text).tolist() == token_ids
    for token_ids in [*encoded, *random_ids]:
        for skip in (True, False):
            expected = reference.decode(token_ids, skip_special_tokens=skip)
            assert codec.decode(token_ids, skip_special_tokens=skip) == expected
            some = sorted(dice.randrange(len(token_ids)) for _ in range(9))
            for cuts in (list(range(len(token_ids))), some):
                detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip)
                parts = [detokenizer.push(token_ids[at:end]) for at, end in pairwise([0, *cuts, len(token_ids)])]
                assert "".join(parts) + detokenizer.finish() == expected


def test_chats_are_those_of_transformers(folder: Path, reference: Tokenizer, codec: TextCodec) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if (source := config.get("chat_template")) is None:
        pytest.skip("the package has no chat template")
    stored = {key: config.get(key) or "" for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokens = {key: one if isinstance(one, str) else one["content"] for key, one in stored.items() if one}
    for turns in CHATS.values():
        for tools in ([], [TOOL]) if "tools" in source else ([],):
            (expected,), _ = render_jinja_template(
                conversations=[[{"role": one.role, "content": one.content} for one in turns]],
                chat_template=source,
                tools=tools or None,
                add_generation_prompt=True,
                **tokens,
            )
            found = codec.encode_chat(turns, ChatOptions(tools=json.dumps(tools) if tools else ""))
            assert found.token_ids.tolist() == reference.encode(expected, add_special_tokens=False).ids
