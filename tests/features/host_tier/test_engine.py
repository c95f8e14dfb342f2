"""The whole engine with a host tier: conversations larger than the pool keep their prefixes, and no token changes."""

from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from engine.features.host_tier import rank
from tests.features.host_tier.late_copies import LateCopies
from tests.models.checkpoints import build, random_tokens, save

CONVERSATIONS, TURNS = 6, 3
FIRST_LEN, TURN_LEN, OUTPUT_LEN = 64, 10, 12
WHOLE_LEN = FIRST_LEN + (TURNS - 1) * TURN_LEN + TURNS * OUTPUT_LEN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def converse(checkpoint: Path, page_size: int, pool_len: int, host_len: int) -> tuple[list[list[int]], list[list[int]]]:
    """Two conversations at a time, in turns.  Every conversation's tokens, and the cached tokens of each turn."""
    kv = {"page_size": page_size, "num_pages": pool_len // page_size, "num_host_pages": host_len // page_size}
    histories = [random_tokens(FIRST_LEN, seed) for seed in range(CONVERSATIONS)]
    cached: list[list[int]] = [[] for _ in histories]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(checkpoint, progress=False, config={"kv": kv, "model": {"dtype": "float32", "tokenizer": "none"}}) as llm:
        for turn in range(TURNS):
            for first in range(0, CONVERSATIONS, 2):
                pair = range(first, first + 2)
                for number, completion in zip(
                    pair, llm.generate([histories[one] for one in pair], params), strict=True
                ):
                    histories[number] += completion.token_ids
                    cached[number].append(completion.usage.cached_tokens)
                    if turn < TURNS - 1:
                        histories[number] += random_tokens(TURN_LEN, seed=100 * turn + number)
    return histories, cached


@pytest.mark.parametrize("page_size", [1, 16])
def test_conversations_larger_than_the_pool_are_cached_whole_and_right(
    checkpoint: Path, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    working_set = CONVERSATIONS * -(-WHOLE_LEN // 16) * 16
    pool_len = working_set // 3
    expected, roomy = converse(checkpoint, page_size, pool_len=2 * working_set, host_len=0)
    alone, without = converse(checkpoint, page_size, pool_len, host_len=0)
    tiered, with_host = converse(checkpoint, page_size, pool_len, host_len=working_set)
    scarce, partly = converse(checkpoint, page_size, pool_len, host_len=working_set // 2)
    assert alone == tiered == scarce == expected
    assert with_host == roomy, "with the host tier, as much is cached as if the pool held everything"
    assert sum(map(sum, without)) == 0, "a conversation has gone from the small pool when its next turn comes"
    assert sum(map(sum, partly)) < sum(map(sum, roomy)), "half of the conversations do not fit the host either"
    assert all(turns[-1] > FIRST_LEN for turns in with_host)
    monkeypatch.setattr(rank, "copies_on", lambda device: LateCopies())
    assert converse(checkpoint, page_size, pool_len, host_len=working_set) == (expected, with_host)
