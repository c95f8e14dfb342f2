"""Requests for results of prompts alone: log probabilities of their tokens, and embeddings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from callboard import LLM, SamplingParams
from engine.execution import prompt_logprobs
from engine.features.pooling.rank import PooledPrompts, PooledRows
from engine.messages import Delta, RequestOptions
from engine.models.decoder import Decoder

PROMPT = list(range(40, 140))


def asked(llm: LLM, prompt: list[int], prompt_only: bool = True, **params: object) -> Delta:
    """One request through the engine's own door."""

    async def ask() -> Delta:
        one = SamplingParams(max_tokens=1, temperature=0.0, **params)
        return await llm._system.ingress.open(prompt, one, RequestOptions(prompt_only=prompt_only)).collect()

    return llm._await(ask())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False) as llm:
        yield llm


def scores(delta: Delta) -> list[float]:
    return [entry.sampled.logprob for entry in delta.prompt_logprobs]


def test_a_prompt_scores_as_the_same_tokens_did_when_they_were_sampled(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT[:10]], SamplingParams(temperature=1.0, seed=3, max_tokens=60, logprobs=3))
    tokens = PROMPT[:10] + output.token_ids
    delta = asked(llm, tokens, prompt_logprobs=3)
    assert [entry.sampled.token_id for entry in delta.prompt_logprobs] == tokens
    sampled = [entry.sampled.logprob for entry in output.logprobs]
    assert scores(delta)[10:] == pytest.approx(sampled, abs=1e-3)
    tops = [[token.token_id for token in entry.top] for entry in delta.prompt_logprobs]
    assert tops[0] == []
    assert tops[10:] == [[token.token_id for token in entry.top] for entry in output.logprobs]
    assert (delta.text, delta.token_ids, delta.usage.completion_tokens) == ("", b"", 0)


def test_chunks_and_the_cache_change_no_score(llm: LLM) -> None:
    first = scores(asked(llm, PROMPT, prompt_logprobs=0))
    assert scores(asked(llm, PROMPT, prompt_logprobs=0)) == first, (
        "what is cached is computed again, since it has no scores"
    )
    with LLM(progress=False, config={"scheduler": {"max_step_tokens": 64, "prefill_chunk": 7}}) as small:
        assert scores(asked(small, PROMPT, prompt_logprobs=0)) == pytest.approx(first, abs=1e-4)


def test_scores_are_computed_some_rows_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores(asked(llm, PROMPT, prompt_logprobs=0))
    monkeypatch.setattr(prompt_logprobs, "SCORED_ROWS", 3)
    most, logits = [0], Decoder.logits

    def watching(self: Decoder, x_ND: torch.Tensor) -> torch.Tensor:
        most[0] = max(most[0], len(x_ND))
        return logits(self, x_ND)

    monkeypatch.setattr(Decoder, "logits", watching)
    assert scores(asked(llm, PROMPT, prompt_logprobs=0)) == pytest.approx(whole, abs=1e-4)
    assert most[0] == 3 < len(PROMPT)


def test_scores_come_with_an_output_as_well(llm: LLM) -> None:
    delta = asked(llm, PROMPT, prompt_only=False, prompt_logprobs=1, logprobs=1)
    assert len(delta.prompt_logprobs) == len(PROMPT)
    assert len(delta.logprobs) == 1
    assert len(delta.token_ids) == 4


def test_a_prompt_of_one_token_has_no_scores_but_its_token(llm: LLM) -> None:
    delta = asked(llm, [50], prompt_logprobs=2)
    assert [entry.sampled.token_id for entry in delta.prompt_logprobs] == [50]


def vector(llm: LLM, prompt: list[int], pooling: str) -> np.ndarray:
    raw = np.frombuffer(asked(llm, prompt, pooling=pooling).result, dtype=np.float32)
    return raw / np.linalg.norm(raw)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_same_however_it_is_computed(llm: LLM, pooling: str) -> None:
    first = vector(llm, PROMPT, pooling)
    if pooling == "last":
        assert llm.embed([PROMPT])[0].data == pytest.approx(first, abs=1e-5), "its length is one"
    assert vector(llm, PROMPT, pooling) == pytest.approx(first, abs=1e-5), "with what is cached"
    with LLM(progress=False, config={"scheduler": {"max_step_tokens": 64, "prefill_chunk": 7}}) as small:
        assert vector(small, PROMPT, pooling) == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_sum_whose_step_had_no_room_is_begun_anew(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = PooledRows._read, []

    def full(self: PooledRows, *arguments: Any) -> PooledPrompts:
        found = read(self, *arguments)
        calls.append(found)
        if len(calls) == 1:
            raise error("planted")
        return found

    with LLM(progress=False, config={"scheduler": {"max_step_tokens": 64, "prefill_chunk": 7}}) as llm:
        expected = np.frombuffer(asked(llm, PROMPT, pooling="mean").result, dtype=np.float32)
        monkeypatch.setattr(PooledRows, "_read", full)
        found = np.frombuffer(asked(llm, PROMPT, pooling="mean").result, dtype=np.float32)
    assert len(calls) > 2
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_last_token_sees_all_and_the_mean_weighs_all(llm: LLM) -> None:
    changed = [5, *PROMPT[1:]]
    assert abs(float(vector(llm, PROMPT, "last") @ vector(llm, changed, "last"))) < 0.99999
    assert float(vector(llm, PROMPT, "mean") @ vector(llm, changed, "mean")) > 0.9
    assert vector(llm, [50], "last") == pytest.approx(vector(llm, [50], "mean"), abs=1e-6)


def test_prompts_and_outputs_share_steps(llm: LLM) -> None:
    """A batch of all kinds gives each what it would get alone."""

    async def ask() -> tuple[list[Delta], list[Delta]]:
        ingress = llm._system.ingress
        plain = SamplingParams(max_tokens=20, temperature=0.0)
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        pooled = SamplingParams(max_tokens=1, temperature=0.0, pooling="mean")
        kinds = [(plain, False), (scored, True), (pooled, True)]
        prompts = [PROMPT[n : n + 40] for n in range(9)]
        streams = [
            ingress.open(prompt, kinds[n % 3][0], RequestOptions(prompt_only=kinds[n % 3][1]))
            for n, prompt in enumerate(prompts)
        ]
        together = [await stream.collect() for stream in streams]
        alone = []
        for n, prompt in enumerate(prompts):
            alone.append(
                await ingress.open(prompt, kinds[n % 3][0], RequestOptions(prompt_only=kinds[n % 3][1])).collect()
            )
        return together, alone

    together, alone = llm._await(ask())
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert scores(one) == pytest.approx(scores(other), abs=1e-3)
        assert np.frombuffer(one.result, np.float32) == pytest.approx(np.frombuffer(other.result, np.float32), abs=1e-4)


@pytest.mark.slow
def test_executors_in_processes_of_their_own_tell_the_same(llm: LLM) -> None:
    with LLM(progress=False, config={"placement": {"executor": "process"}}) as other:
        for pooling in ("last", "mean"):
            assert vector(other, PROMPT, pooling) == pytest.approx(vector(llm, PROMPT, pooling), abs=1e-5)
        scored = asked(other, PROMPT, prompt_logprobs=2)
        assert scores(scored) == pytest.approx(scores(asked(llm, PROMPT, prompt_logprobs=2)), abs=1e-4)
