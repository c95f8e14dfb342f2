"""The tokenizer of a GGUF file, as the files that a checkpoint in Hugging Face format has for it.

Owns: how texts are split by the name of the pre-tokenizer, the merges of a vocabulary with scores, which tokens are
special.  Does not know: the tokenizers library, which reads these files.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.checkpoints.gguf_header import GGUFHeader
from engine.types.errors import WeightsError

CONTROL, USER_DEFINED = 3, 4  # types of tokens, in ``tokenizer.ggml.token_type``
SPACE = "▁"
MAX_TOKEN = 1024  # characters, each of which may divide it; models have tokens of up to about 100
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER_NOT_HAN, LOWER_NOT_HAN = (rf"[{one[1:-1]}&&[^\p{{Han}}]]" for one in (UPPER, LOWER))
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER_NOT_HAN}*{LOWER_NOT_HAN}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER_NOT_HAN}+{LOWER_NOT_HAN}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# tokenizer.ggml.pre -> the patterns that split a text, one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "exaone4"), (GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), (LLAMA3,)),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "kormo", "megrez"), (QWEN2,)),
    "qwen35": (QWEN35,),
    "seed-coder": (SEED,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    "kimi-k2": (KIMI,),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (GPT4O,)),
}
# Their texts begin with a token unless the file denies it.
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
WHOLE_WORDS = (*BEGUN, "glm4", "glm5")  # their vocabularies have whole words that merges do not reach
COMPOSED = ("qwen2", "qwen35")  # read after Unicode's normalisation to composed characters
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(header: GGUFHeader) -> dict[str, bytes]:
    """Return name -> content of the tokenizer's files.  Raises WeightsError for a tokenizer that is not read."""
    kind, tokens = header.value("tokenizer.ggml.model"), header.value("tokenizer.ggml.tokens")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _with_merges}
    maker = makers.get(kind) if isinstance(kind, str) else None
    if maker is None or not _are_texts(tokens):
        expected = f"expected one of {', '.join(makers)}, with its tokens"
        raise WeightsError(
            f"{header.path}: tokenizer.ggml.model is {kind!r}, {expected}; set model.tokenizer to a directory with the "
            "model's tokenizer.json, or to 'none' to work with token ids only"
        )
    kinds = header.value("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [1] * len(tokens)
    named = {name: _token(header, tokens, key) for name, key in NAMES.items()}
    content = maker(header, tokens, kinds)
    added = [
        {"id": number, "content": token, "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    content |= {"version": "1.0", "added_tokens": added, "post_processor": _around(header, tokens, content, named)}
    config = {name: token for name, token in named.items() if token is not None}
    files = {"tokenizer.json": msgspec.json.encode(content), "tokenizer_config.json": msgspec.json.encode(config)}
    template = header.value("tokenizer.chat_template")
    return files | ({"chat_template.jinja": template.encode()} if isinstance(template, str) else {})


def _byte_level(header: GGUFHeader, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return the parts of a tokenizer that merges bytes."""
    pre = header.value("tokenizer.ggml.pre") or "default"
    if not isinstance(pre, str) or pre not in SPLITS:
        raise WeightsError(
            f"{header.path}: tokenizer.ggml.pre is {pre!r}, expected one of {', '.join(SPLITS)}; set model.tokenizer "
            "to a directory with the model's tokenizer.json"
        )
    merges = header.value("tokenizer.ggml.merges")
    if not _are_texts(merges):
        raise WeightsError(f"{header.path}: tokenizer.ggml.merges is missing, or no list of texts")
    alphabet = _byte_alphabet()
    known = set(alphabet)
    vocabulary: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        # Some files have words of the vocabulary as they are read, not in the alphabet of bytes.
        spelled = kind in (CONTROL, USER_DEFINED) or known.issuperset(token)
        vocabulary[token if spelled else "".join(alphabet[byte] for byte in token.encode())] = number
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in SPLITS[pre]
    ]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_of]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": pre in WHOLE_WORDS},
    }


def _sentencepiece(header: GGUFHeader, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return the parts of a tokenizer of SentencePiece, which falls back to bytes for characters that it lacks."""
    scores = header.value("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise WeightsError(f"{header.path}: tokenizer.ggml.scores is no list of {len(tokens)} numbers, one per token")
    if (longest := max(map(len, tokens))) > MAX_TOKEN:
        raise WeightsError(f"{header.path}: a token has {longest} characters, expected {MAX_TOKEN} at most")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return _falling_back(header, tokens, _merges(vocabulary, scores))


def _with_merges(header: GGUFHeader, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return the parts of Gemma 4's tokenizer: one of SentencePiece whose file has its merges."""
    merges = header.value("tokenizer.ggml.merges")
    if not _are_texts(merges):
        raise WeightsError(f"{header.path}: tokenizer.ggml.merges is missing, or no list of texts")
    return _falling_back(header, tokens, merges)


def _falling_back(
    header: GGUFHeader, tokens: list[str], merges: Sequence[str] | Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return the parts of a tokenizer that writes spaces as a character, and bytes for characters that it lacks."""
    spaced = header.value("tokenizer.ggml.add_space_prefix") is not False
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replaced] if spaced else [replaced]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "unk_token": _token(header, tokens, "unknown"),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every division of a token into two others; those of tokens with high scores come first."""
    found = [
        (-scores[number], -at, at - len(token), number, at, token)
        for token, number in vocabulary.items()
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    return [(token[:at], token[at:]) for *_, at, token in sorted(found)]


def _around(
    header: GGUFHeader, tokens: list[str], content: dict[str, Any], named: dict[str, str | None]
) -> dict[str, Any] | None:
    """Return the tokens around every text; None for none."""
    begins = header.value("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = content["model"].get("byte_fallback") or header.value("tokenizer.ggml.pre") in BEGUN
    if header.value("tokenizer.ggml.model") == "gemma4":
        begins = True  # early files deny it
    before = [named["bos_token"]] if begins else []
    after = [named["eos_token"]] if header.value("tokenizer.ggml.add_eos_token") else []
    around = [[{"SpecialToken": {"id": one, "type_id": 0}} for one in side if one] for side in (before, after)]
    if not any(around):
        return None
    first, second = ({"Sequence": {"id": one, "type_id": 0}} for one in "AB")
    special = {one: {"id": one, "ids": [tokens.index(one)], "tokens": [one]} for one in (*before, *after) if one}
    single, pair = [*around[0], first, *around[1]], [*around[0], first, second, *around[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _token(header: GGUFHeader, tokens: list[str], name: str) -> str | None:
    number = header.value(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if type(number) is int and 0 <= number < len(tokens) else None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _byte_alphabet() -> list[str]:
    """Return the printable character of each byte, as GPT-2 writes it: its own, or one from 256 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte) if byte in own else chr(256 + others.index(byte)) for byte in range(256)]
