"""Conversations with pictures give transformers' greedy tokens, whatever the chunks, and a picture is encoded once."""

from pathlib import Path

import pytest

from tests.features.images import made
from tests.features.images.served import ONE, THREE, chat, checkpoint, encoded, engine, expected, message

FAST = ("llava", "qwen3_vl")


def check(name: str, folder: Path, num_tokens: int) -> None:
    """Compare an engine with transformers: one and three pictures, whole and in chunks, alone, cached, and twice."""
    directory = checkpoint(name, folder)
    one, three = (expected(name, folder, sizes, num_tokens) for sizes in (ONE, THREE))
    other = message([(50, 30)])
    for chunk in (256, 7):
        with engine(directory, scheduler={"prefill_chunk": chunk}) as llm:
            (first,) = chat(llm, [message(ONE)], num_tokens)
            assert first.token_ids == one
            assert encoded(llm) == 1
            again = chat(llm, [message(THREE), message(ONE), message(THREE), message(ONE)], num_tokens)
            assert [each.token_ids for each in again] == [three, one, three, one]
            assert encoded(llm) == 3
            assert again[1].usage.cached_tokens > first.usage.prompt_tokens - 8
            assert chat(llm, [other], num_tokens)[0].token_ids != one, "a picture changes nothing"


@pytest.mark.parametrize("name", FAST)
def test_pictures_give_the_tokens_of_transformers(name: str, folder: Path) -> None:
    check(name, folder, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", made.KINDS)
def test_every_family_gives_64_tokens_of_transformers(name: str, folder: Path) -> None:
    check(name, folder, 64)
