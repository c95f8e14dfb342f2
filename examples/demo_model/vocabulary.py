"""Owns the tokenizer and the token arrays: training the BPE, encoding, packing, chat template.

Token streams are stored as uint16 `.npy` files in the work directory, so a resumed run maps them
instead of tokenizing again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from corpus import Corpus, training_order
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- set rest = messages %}
{%- if tools %}
{%- set own = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}
{%- set function = tool.function or tool %}
{{- function.name + '(' + ((function.parameters or {}).properties or {}) | join(', ') + '): ' }}
{{- (function.description or '') + '\\n' }}
{%- endfor %}
{{- 'To call one: <tool_call>\\n{"name": "...", "arguments": {}}\\n</tool_call>' }}
{{- ('\\n\\n' + own if own else '') + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in rest %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SPLIT_NEWLINE_SHARE = 0.2
Tokens = npt.NDArray[np.uint16]


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE from the training files only; bytes need no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Library code only: test data holds strings that would waste a small vocabulary.
    texts = (file.text for file in corpus.train if not file.is_test)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> Iterator[Tokens]:
    """Encode each text and close it with the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    for start in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[start : start + 64]):
            yield np.asarray([*encoding.ids, end], dtype=np.uint16)


def split_newlines(tokenizer: Tokenizer, tokens: Tokens, rng: np.random.Generator) -> Tokens:
    """Split some "newline and indentation" tokens into a newline and the indentation.

    Inside a text the two are one token, but a prompt usually ends right after the newline. Without
    having seen that split, the model takes a lone newline to mean that nothing is indented.
    """
    vocabulary = tokenizer.get_vocab()
    indentation = np.zeros(len(vocabulary), dtype=np.uint16)
    for text, token in vocabulary.items():
        if text.startswith("ĊĠ"):
            indentation[token] = vocabulary.get(text[1:], 0)
    drawn = rng.random(len(tokens)) < SPLIT_NEWLINE_SHARE
    places = np.flatnonzero(drawn & (indentation[tokens] > 0))
    after = indentation[tokens[places]]
    split = tokens.copy()
    split[places] = vocabulary["Ċ"]
    return np.insert(split, places + 1, after)


def pack_training_stream(tokenizer: Tokenizer, corpus: Corpus, seed: int) -> Tokens:
    """One long stream: shuffled documents, each closed by end-of-text, with no padding."""
    pools = {
        "file": list(encode_documents(tokenizer, [file.text for file in corpus.train])),
        "chat": list(encode_documents(tokenizer, corpus.chats)),
    }
    order = training_order(corpus, seed)
    stream = np.concatenate([pools[kind][i] for kind, i in order])
    return split_newlines(tokenizer, stream, np.random.default_rng(seed))


def prepare(corpus: Corpus, work_dir: Path, vocab_size: int, seed: int) -> dict[str, int]:
    """Write tokenizer.json, train.npy and corpus.json into `work_dir`; return the counts."""
    tokenizer = train_tokenizer(corpus, vocab_size)
    tokenizer.save(str(work_dir / "tokenizer.json"))
    stream = pack_training_stream(tokenizer, corpus, seed)
    np.save(work_dir / "train.npy", stream)
    counts = {
        "train_files": len(corpus.train),
        "held_out_files": len(corpus.held_out),
        "train_bytes": corpus.train_bytes(),
        "held_out_bytes": sum(len(file.text.encode()) for file in corpus.held_out),
        "chat_documents": len(corpus.chats),
        "chat_bytes": sum(len(chat.encode()) for chat in corpus.chats),
        "stream_tokens": int(stream.size),
    }
    # Written last: its presence says that the preparation is complete.
    (work_dir / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n")
    return counts


def save_tokenizer_files(tokenizer: Tokenizer, out_dir: Path, context: int) -> None:
    """Write the tokenizer with the settings `transformers` reads beside it."""
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)
