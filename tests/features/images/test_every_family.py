"""Every family with short pages, in one digest and with films; some on two ranks and with a killed executor."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import Config
from engine.plugins.parsers import plugin_codec
from engine.text.turns import read_turn
from engine.types.errors import ConfigError
from tests.features.images import made
from tests.features.images.served import ONE, THREE, chat, checkpoint, encoded, engine, expected, message, params
from tests.features.images.test_films import asked, filming, frames
from tests.features.images.test_films import expected as expected_of_film
from tests.workers.executors import send

pytestmark = pytest.mark.slow
NUM = 16
MIXED = [message(THREE), message(ONE), message(THREE)]
RANKS = {"device": {"tensor_parallel": 2, "threads": 1, "kind": "cpu"}}
FILMED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "internvl", "llava_onevision", "gemma4")
# No proof of invariant numerics covers the decoder of Gemma 4.
VARYING = {"gemma4", "gemma4_small"}
# Ranks divide the decoder, and each has the whole tower: one of each way that rows of pictures take into a decoder.
DIVIDED = ["llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma4"]
# Pages alone, recurrent states, pools of several shapes.  Nothing that is sent again depends on the family.
KILLED = ["qwen3_vl", "qwen3_5", "gemma4"]
# Elsewhere these ways are one engine.
FILMED_IN_EACH_WAY = "qwen3_vl"


def wanted(name: str, folder: Path) -> list[list[int]]:
    """The tokens of transformers for ``MIXED``."""
    return [expected(name, folder, sizes, NUM) for sizes in (THREE, ONE, THREE)]


@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks(name: str, folder: Path) -> None:
    with engine(checkpoint(name, folder), **RANKS) as llm:
        assert [one.token_ids for one in chat(llm, MIXED, NUM)] == wanted(name, folder)
        assert encoded(llm) == 3


@pytest.mark.parametrize("name", KILLED)
def test_an_executor_that_is_killed(name: str, folder: Path) -> None:
    with engine(checkpoint(name, folder), placement={"executor": "process"}) as llm:
        stream = llm.stream([message(THREE)], params(NUM))
        tokens = [next(stream).token_ids]
        send(signal.SIGKILL)
        tokens += [delta.token_ids for delta in stream]
        found = np.frombuffer(b"".join(tokens), dtype=np.int32).tolist()
    assert found == expected(name, folder, THREE, NUM)


@pytest.mark.parametrize("name", made.KINDS)
def test_pages_that_are_short(name: str, folder: Path) -> None:
    pages = -(-(longest_prompt(name, folder) + NUM) // 4) + 8
    with engine(checkpoint(name, folder), kv={"page_size": 4, "num_pages": pages}) as llm:
        assert [one.token_ids for one in chat(llm, MIXED * 2, NUM)] == wanted(name, folder) * 2


def longest_prompt(name: str, folder: Path) -> int:
    """The most tokens of a conversation of ``MIXED``."""
    codec = plugin_codec(Config(), checkpoint(name, folder))
    return max(len(codec.encode_chat([read_turn(one)]).token_ids) for one in MIXED)


@pytest.mark.parametrize("name", made.KINDS)
def test_one_digest_in_invariant_numerics(name: str, folder: Path) -> None:
    if name in VARYING:
        invariant = {"dtype": "float32", "numerics": "invariant"}
        with pytest.raises(ConfigError, match="numerics=invariant"), engine(checkpoint(name, folder), model=invariant):
            pass
        return
    found = set()
    for tables in ({}, {"scheduler": {"max_running": 2}, "images": {"cache_tokens": 400}}):
        config: dict[str, Any] = {"model": {"dtype": "float32", "numerics": "invariant"}, "device": {"threads": 1}}
        with engine(checkpoint(name, folder), **config | tables) as llm:
            outputs = llm.chat([[one] for one in MIXED], params(NUM).replace(logprobs=2))
            found.add(repr([one.logprobs for one in outputs]))
    assert len(found) == 1


@pytest.mark.parametrize("name", FILMED)
def test_films(name: str, folder: Path) -> None:
    directory, film = filming(name, folder), asked([*frames(4, 50, 70)], fps=2.0)
    tokens = expected_of_film(name, directory, film, NUM)
    ways = [RANKS, {"scheduler": {"max_running": 2, "prefill_chunk": 5}}]
    if name == FILMED_IN_EACH_WAY:
        ways.append({"placement": {"encoder": "process"}})
    else:
        ways = [ways[0] | ways[1]]
    for tables in ways:
        with engine(directory, **tables) as llm:
            assert [one.token_ids for one in chat(llm, [film, film], NUM)] == [tokens] * 2
