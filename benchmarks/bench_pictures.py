"""Measures conversations with pictures through the whole engine, beside the ``generate`` of transformers.

A random model of a shape is served in both ways, which take turns, in float32.  In each turn a conversation with a new
picture is answered alone, and then eight conversations about another new picture at once; transformers gets these as
one batch.  A time is of all threads' CPU, and covers the preparation of pixels, the encoder, the prompt and the answer.
Ratios are those of transformers' time to callboard's in the same turn; wanted are 1.5 alone and 3 for eight.

    OMP_NUM_THREADS=1 python benchmarks/bench_pictures.py
    python benchmarks/bench_pictures.py --shapes tiny --turns 1 --tokens 4      # a smoke run
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from machine import keep, new_parser
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from callboard import LLM, SamplingParams
from engine.config import Config
from engine.plugins.parsers import plugin_codec
from engine.text.pictures import FIRST_ID
from engine.text.turns import read_turn

WANTED = {1: 1.5, 8: 3.0}
SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>", "<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_ID = SPECIAL.index("<image>")
TEMPLATE = (
    "<s>{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}"
)
Conversations = list[list[dict[str, Any]]]
Way = Callable[[bytes, int, int], list[list[int]]]
"""Answers so many conversations about a picture with so many tokens each."""


class Shape(NamedTuple):
    """The sizes of a model of SmolVLM's family, and of the pictures that it is given.

    longest: side to which a picture is enlarged.  scale: places of the encoder in a line of one of the prompt's."""

    text: dict[str, Any]
    vision: dict[str, Any]
    longest: int
    scale: int
    size: tuple[int, int]


SHAPES = {
    "tiny": Shape(
        {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512,
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14,
        },
        112, 2, (120, 80),
    ),
    "smolvlm-256m": Shape(
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49280,
        },
        {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 512, "patch_size": 16,
        },
        2048, 4, (1024, 768),
    ),
}  # fmt: skip


def write(shape: Shape, directory: Path) -> Path:
    """Write a checkpoint with random weights, a tokenizer of bytes, and the processor of pictures."""
    tiles = [f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)]
    words = [*SPECIAL, *tiles, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *tiles])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    side = shape.vision["image_size"]
    transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": shape.longest}, max_image_size={"longest_edge": side}
    ).save_pretrained(directory)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 8192}
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **special, **shape.text},
        vision_config=shape.vision,
        scale_factor=shape.scale,
        pad_token_id=0,
        image_token_id=IMAGE_ID,
    )
    torch.manual_seed(1)
    transformers.SmolVLMForConditionalGeneration(config).save_pretrained(directory)
    return directory


def drawn(shape: Shape, seed: int) -> bytes:
    """A picture that no turn had before."""
    colours = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(shape.size, Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def conversations(picture: bytes, count: int) -> Conversations:
    """Conversations about a picture, of one length, so that transformers needs no padding."""
    image = {"type": "image", "image": picture}
    return [
        [{"role": "user", "content": [image, {"type": "text", "text": f"Question {number}: what is this?"}]}]
        for number in range(count)
    ]


def generates(directory: Path) -> Way:
    """The way of transformers."""
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(directory).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    codec = plugin_codec(Config(), directory)

    def run(picture: bytes, count: int, num_tokens: int) -> list[list[int]]:
        prompts = [codec.encode_chat([read_turn(turn) for turn in one]) for one in conversations(picture, count)]
        ids = torch.tensor(np.array([one.token_ids for one in prompts]))
        ids = torch.where(ids >= FIRST_ID, IMAGE_ID, ids).long()
        images = [[Image.open(io.BytesIO(picture)).convert("RGB")] for _ in range(count)]
        inputs = processor(images=images, return_tensors="pt")
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=inputs["pixel_values"],
            pixel_attention_mask=inputs["pixel_attention_mask"],
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
        )
        return [line.tolist() for line in output[:, ids.shape[1] :]]

    return run


def serves(llm: LLM) -> Way:
    """The way of callboard."""

    def run(picture: bytes, count: int, num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [one.token_ids for one in llm.chat(conversations(picture, count), params)]

    return run


def measure(shape: Shape, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a shape, for each number of conversations at once."""
    tables = {
        "device": {"kind": "cpu", "threads": given.threads},
        "kv": {"num_pages": 2048},
        "model": {"dtype": "float32"},
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = write(shape, Path(folder))
        with LLM(directory, progress=False, config=tables) as llm:
            ways = {"transformers": generates(directory), "callboard": serves(llm)}
            for way in ways.values():
                way(drawn(shape, 0), 1, 2)
            found = [_turn(ways, shape, seed, given) for seed in range(1, given.turns + 1)]
    return [
        {
            "at_once": count,
            "seconds": {name: [turn[count][name] for turn in found] for name in ways},
            "ratio": statistics.median(turn[count]["transformers"] / turn[count]["callboard"] for turn in found),
            "wanted": WANTED[count],
            "same_tokens": [turn[count]["same"] for turn in found],
        }
        for count in given.at_once
    ]


def _turn(ways: dict[str, Way], shape: Shape, seed: int, given: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Seconds of CPU of each way, and whether the answers are the same, by the number of conversations."""
    figures: dict[int, dict[str, Any]] = {}
    for count in given.at_once:
        picture, answers = drawn(shape, 100 * seed + count), []
        figures[count] = {}
        for name, way in ways.items():
            started = time.process_time()
            answers.append(way(picture, count, given.tokens))
            figures[count][name] = time.process_time() - started
        figures[count]["same"] = answers[0] == answers[1]
    return figures


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, nargs="+", choices=WANTED, default=list(WANTED), help="conversations")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.set_verbosity_error()
    figures = {name: measure(SHAPES[name], given) for name in given.shapes}
    table = Table("shape", "at once", "transformers, s", "callboard, s", "ratio", "wanted", "same")
    for name, rows in figures.items():
        for row in rows:
            times = [f"{statistics.median(seconds):.2f}" for seconds in row["seconds"].values()]
            same = f"{sum(row['same_tokens'])} of {given.turns}"
            table.add_row(name, str(row["at_once"]), *times, f"{row['ratio']:.2f}", f"{row['wanted']}", same)
    Console().print(table)
    keep(given.output, {"turns": given.turns, "tokens": given.tokens, "threads": given.threads, "shapes": figures})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
