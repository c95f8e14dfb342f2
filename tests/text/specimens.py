"""Tokenizers made here, one of each kind that models use, and the checkpoint directories they live in."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text.codec import TextCodec

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n    x: int = 0\n",
    "Zoë naïvely cafés — “quotes” … 100 % 3.14159",
    "你好，世界。今天天气很好。",
    "🐈‍⬛🙂👩‍👩‍👧 é à ä",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: BPE over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    # Added tokens that look like bytes, hold spaces, or hold characters outside the byte alphabet.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("é!", "two words", "日本", "Ġx")])
    return tokenizer


def llama2() -> Tokenizer:
    """Llama 2, Mistral 7B: SentencePiece BPE with byte fallback, a space put in front of every text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS[:3] * 3, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for token in learned["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """Gemma: as Llama 2, but nothing is put in front and nothing is stripped."""
    tokenizer = llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5-like Unigram with a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def words() -> Tokenizer:
    """Whole words and no decoder."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


MAKERS = {"byte_level": byte_level, "llama2": llama2, "gemma": gemma, "metaspace": metaspace, "words": words}


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """A checkpoint directory with this tokenizer; ``config`` becomes tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def codec(tokenizer: Tokenizer, directory: Path, **config: Any) -> TextCodec:
    """The codec of such a directory."""
    return TextCodec.load(save(tokenizer, directory, **config))
