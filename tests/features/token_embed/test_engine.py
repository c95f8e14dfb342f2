"""A vector for each token of a prompt, as transformers computes its last states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.functional import normalize

from callboard import LLM, RequestError
from engine.features.token_embed import rank
from tests.models.pooled import RAGGED, build, states

CONFIGS: list[dict[str, Any]] = [
    {},
    {"scheduler": {"max_step_tokens": 64, "prefill_chunk": 7}},
    {"device": {"tensor_parallel": 2}, "placement": {"executor": "process"}},
]


def opened(directory: Path, **config: Any) -> LLM:
    tables = {"model": {"tokenizer": "none"}, "kv": {"num_pages": 200}}
    return LLM(directory, progress=False, config={**tables, **config})


@pytest.mark.parametrize("config", [*CONFIGS[:2], pytest.param(CONFIGS[2], marks=pytest.mark.slow)])
def test_an_embedding_models_tokens_are_the_references(config: dict[str, Any], tmp_path: Path) -> None:
    """The vectors agree in one step, in chunks and on two ranks, and when the prefix cache has the prompts."""
    reference = build("Qwen3", "Model")
    reference.save_pretrained(tmp_path)
    expected = [states(reference, prompt) for prompt in RAGGED]
    with opened(tmp_path, **config) as llm:
        llm.embed(RAGGED)  # the prefix cache has the prompts from here on
        for output, wanted in zip(llm.encode(RAGGED, pooling_task="token_embed"), expected, strict=True):
            assert output.data.shape == wanted.shape
            assert output.data == pytest.approx(normalize(wanted, dim=-1).numpy(), abs=1e-5)
        raw = llm.encode(RAGGED, pooling_task="token_embed", use_activation=False)
        for output, wanted in zip(raw, expected, strict=True):
            assert output.data == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-4)


def test_a_generating_models_tokens_are_the_references_too(tmp_path: Path) -> None:
    model = build("Qwen3", "ForCausalLM")
    model.save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        last = llm.embed(RAGGED)
        for output, prompt, whole in zip(llm.encode(RAGGED, pooling_task="token_embed"), RAGGED, last, strict=True):
            wanted = normalize(states(model.model, prompt), dim=-1).numpy()
            assert output.data == pytest.approx(wanted, abs=1e-5)
            assert output.data[-1] == pytest.approx(whole.data, abs=1e-5)
            assert output.usage.prompt_tokens == len(prompt) == len(output.data)


def test_a_classifier_does_not_have_the_task(tmp_path: Path) -> None:
    build("Qwen3", "ForSequenceClassification", num_labels=2).save_pretrained(tmp_path)
    with (
        opened(tmp_path) as llm,
        pytest.raises(RequestError, match="pooling_task='token_embed': must be one of classify"),
    ):
        llm.encode([[5]], pooling_task="token_embed")


def test_vectors_that_no_frame_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("Qwen3", "Model").save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        (one,) = llm.encode([RAGGED[3]], pooling_task="token_embed")
        monkeypatch.setattr(rank, "MOST_BYTES", one.data.nbytes)
        (again,) = llm.encode([RAGGED[3]], pooling_task="token_embed")
        assert np.array_equal(again.data, one.data)
        with pytest.raises(RequestError, match="too large; send a shorter one") as refused:
            llm.encode([RAGGED[4]], pooling_task="token_embed")
        assert refused.value.code == "output_too_large"
