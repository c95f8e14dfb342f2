"""Layouts, pixels and positions are those of transformers' processors, for pictures of many sizes."""

import json
from pathlib import Path
from typing import Any

import transformers

from engine.plugins.encoder.transformers import TransformersEncoder
from tests.features.images import made

SIZES = [(1, 1), (56, 56), (57, 55), (31, 300), (300, 31), (640, 480), (101, 99), (1000, 1001)]


def encoder(directory: Path) -> TransformersEncoder:
    return TransformersEncoder(directory, json.loads((directory / "config.json").read_text()))


def processor(name: str, directory: Path) -> Any:
    """transformers' own processor of a kind."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return made.KINDS[name].processor_of(directory, tokenizer)
