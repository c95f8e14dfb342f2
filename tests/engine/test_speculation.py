"""Speculation on a real model: the tokens, greedy and sampled, are those without it, whatever is proposed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from callboard import LLM, SamplingParams
from engine.features.speculation.payoff import Payoff
from engine.plugins.proposer.ngram import NgramProposer
from server.extensions.chaos.sim.liars import Everything, Liar, LiarSession
from server.extensions.verify.verify import Way, verify_numerics
from tests.engine.test_invariance import BASE, BY_NAME
from tests.models.checkpoints import build, random_tokens, save
from tests.sampling.borders import clear_of_borders

VOCAB = 259
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((1, 5, 17, 40, 3, 9, 33, 16, 15, 12, 60, 20))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
SAMPLED = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=11 + index, max_tokens=20, min_tokens=4, logit_bias={5: 1.0})
    for index in range(len(PROMPTS))
]
Said = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def engine(directory: Path, proposer: str, **tables: dict) -> LLM:
    config = {
        "model": {"tokenizer": "none"},
        "device": {"threads": 1},
        "kv": {"num_pages": 128, "page_size": 16},
        "scheduler": {"max_running": 12, "prefill_chunk": 512},
        "plugins": {"proposer": proposer},
    }
    return LLM(directory, progress=False, config={name: table | tables.get(name, {}) for name, table in config.items()})


def said(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]) -> Said:
    found = llm.generate(list(prompts), params)
    return [(one.token_ids, [token.sampled.logprob for token in one.logprobs]) for one in found]


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[Said, Said]:
    """Without speculation: greedy, then sampled."""
    with engine(directory, "none") as llm, clear_of_borders():
        return said(llm, PROMPTS, GREEDY), said(llm, PROMPTS, SAMPLED)


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch, plain: tuple[Said, Said]) -> Liar:
    """What is proposed, all of which is verified."""
    texts = [[*prompt, *tokens] for way in plain for prompt, (tokens, _) in zip(PROMPTS, way, strict=True)]

    def next_token(tokens: Sequence[int]) -> int:
        at = len(tokens)
        return next((text[at] for text in texts if len(text) > at and text[:at] == list(tokens)), 0)

    liar = Liar("right", next_token, VOCAB)
    monkeypatch.setattr(NgramProposer, "open", lambda self: LiarSession(liar))
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    return liar


def same(found: Said, expected: Said) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "page_size", "num_tokens", "chunk", "batch"),
    [("right", 16, 8, 512, 12), ("half", 1, 3, 16, 12), ("wrong", 16, 4, 16, 4), ("moody", 1, 8, 512, 1)],
)
def test_tokens_are_those_without(
    directory: Path, plain: tuple[Said, Said], liar: Liar, kind: str, page_size: int, num_tokens: int, chunk: int,
    batch: int,
) -> None:  # fmt: skip
    liar.kind = kind
    tables = {
        "kv": {"page_size": page_size, "num_pages": 2048 // page_size},
        "scheduler": {"prefill_chunk": chunk, "max_running": batch},
        "plugins": {"options": {"proposer.ngram": {"num_tokens": num_tokens}}},
    }
    with engine(directory, "ngram", **tables) as llm, clear_of_borders():
        for _ in range(2):  # then with prompts and outputs in the cache
            same(said(llm, PROMPTS[:batch], GREEDY), plain[0][:batch])
            same(said(llm, PROMPTS[:batch], SAMPLED[:batch]), plain[1][:batch])
        usage = llm.generate([PROMPTS[3]], GREEDY)[0].usage
    assert usage.accepted_tokens >= (12 if kind == "right" else 0)
    assert usage.rejected_tokens > 0 or kind in ("right", "moody")
    assert usage.accepted_tokens == 0 or kind != "wrong"


@pytest.mark.slow
def test_tokens_are_those_without_over_retractions_and_two_ranks(
    directory: Path, plain: tuple[Said, Said], liar: Liar
) -> None:
    liar.kind = "half"
    few = {"kv": {"num_pages": 30, "page_size": 4}, "device": {"tensor_parallel": 2}}
    with engine(directory, "ngram", **few) as llm, clear_of_borders():
        same(said(llm, PROMPTS, GREEDY), plain[0])
        same(said(llm, PROMPTS, SAMPLED), plain[1])


def test_bits_are_the_same_with_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    speculating = Way("with speculation", {"plugins": {"proposer": "ngram"}})
    verify_numerics(BASE, [BY_NAME["alone"], speculating], number=10)


def test_what_is_proposed_has_no_weight_in_what_is_drawn(directory: Path, liar: Liar) -> None:
    """Stronger than equal distributions: each of many seeds draws the same.  One may lie at a border."""
    params = [SamplingParams(temperature=1.0, top_k=4, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(300)]
    liar.kind = "random"
    with engine(directory, "ngram") as llm:
        seen = [tuple(one.token_ids) for one in llm.generate([PROMPTS[2]] * 300, params)]
    with engine(directory, "none") as llm:
        expected = [tuple(one.token_ids) for one in llm.generate([PROMPTS[2]] * 300, params)]
    assert len(set(expected)) > 20
    assert sum(one != other for one, other in zip(seen, expected, strict=True)) <= 1
