"""Engines that serve the tiny checkpoints, and what transformers answers to the same messages."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from callboard import LLM, SamplingParams
from engine.config import Config
from engine.llm import Completion
from engine.plugins.parsers import plugin_codec
from engine.text.pictures import FIRST_ID
from engine.text.turns import read_turn
from tests.features.images import made

ONE, THREE = ((50, 31),), ((33, 90), (120, 41), (50, 31))


@cache
def checkpoint(name: str, folder: Path) -> Path:
    return made.make(name, folder / name)


def message(sizes: Sequence[tuple[int, int]], text: str = "Say it.") -> dict[str, Any]:
    """A message with pictures of these sizes, and words before, between and after them."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "Here:"}]
    for number, size in enumerate(sizes):
        content += [{"type": "image", "image": made.picture(*size)}, {"type": "text", "text": f" {number},"}]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def engine(directory: Path, **more: Any) -> LLM:
    config = {"kv": {"page_size": 4, "num_pages": 400}, "model": {"dtype": "float32"}}
    return LLM(directory, progress=False, config=config | more)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def chat(llm: LLM, messages: Sequence[dict[str, Any]], num_tokens: int = 16) -> list[Completion]:
    """The answers to one message each."""
    return llm.chat([[one] for one in messages], params(num_tokens))


@cache
def expected(
    name: str, folder: Path, sizes: tuple[tuple[int, int], ...], num_tokens: int, other: Path | None = None
) -> list[int]:
    """The tokens of transformers.  other: a checkpoint of the same kind with other weights."""
    directory, given = checkpoint(name, folder), message(sizes)
    with_ids = plugin_codec(Config(), directory).encode_chat([read_turn(given)]).token_ids
    own = made.special_tokens(made.KINDS[name]).index(made.KINDS[name].tokens[0])
    ids = np.where(with_ids >= FIRST_ID, own, with_ids).tolist()
    return made.reference(name, other or directory, ids, [made.picture(*one) for one in sizes], num_tokens)


def encoded(llm: LLM) -> int:
    """How many pictures the engine has encoded."""
    return llm._system.scheduler._planned.features.gauges()["pictures_encoded"]
