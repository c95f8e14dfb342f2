"""Models that generate nothing give what transformers gives: embeddings, labels' logits, scores of pairs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from callboard import LLM, RequestError, SamplingParams
from engine.text.files import read_template
from engine.text.pairs import knows_pairs, pair
from tests.models import checkpoints
from tests.models.pooled import (
    PAD,
    RAGGED,
    build,
    label_logits,
    save_reward_model,
    states,
    with_tokenizer,
    write_modules,
)

SMALL = {"scheduler": {"max_step_tokens": 64, "prefill_chunk": 7}}
TWO_RANKS = {"device": {"tensor_parallel": 2}}
TEMPLATE = "Q: {{ messages[0].content }} ({{ messages[0]['role'] == 'query' }})\nD: {{ messages[-1].content }}\nfits:"


def opened(directory: Path, tokenizer: str = "none", **config: Any) -> LLM:
    tables = {"model": {"tokenizer": tokenizer, **config.pop("model", {})}, "kv": {"num_pages": 200}}
    return LLM(directory, progress=False, config={**tables, **config})


def vectors(llm: LLM, prompts: list[Any] = RAGGED, **fields: Any) -> list[np.ndarray]:
    return [one.data for one in llm.embed(prompts, **fields)]


@pytest.mark.parametrize("pooling, config", [("lasttoken", TWO_RANKS), ("mean_tokens", SMALL)])
def test_embeddings_are_the_references(pooling: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Embeddings agree in a ragged batch, in chunks or on two ranks, and from the prefix cache."""
    reference = build("Qwen3", "Model")
    reference.save_pretrained(tmp_path)
    write_modules(tmp_path, pooling, normalize=True)
    every = [states(reference, prompt) for prompt in RAGGED]
    expected = [normalize(one[-1] if pooling == "lasttoken" else one.mean(dim=0), dim=0) for one in every]
    with opened(tmp_path, **config) as llm:
        for cached in (False, True):
            outputs = llm.embed(RAGGED)
            for output, vector in zip(outputs, expected, strict=True):
                assert output.data == pytest.approx(vector.numpy(), abs=1e-5)
            if pooling == "lasttoken":
                assert any(output.usage.cached_tokens for output in outputs) == cached
        assert [output.usage.prompt_tokens for output in outputs] == [len(prompt) for prompt in RAGGED]


def test_an_embedding_is_cut_and_stays_raw_where_no_module_normalizes(tmp_path: Path) -> None:
    reference = build("Llama", "Model", matryoshka_dimensions=[8, 16])
    reference.save_pretrained(tmp_path)
    write_modules(tmp_path, "lasttoken", normalize=False)
    with opened(tmp_path) as llm:
        (whole,) = vectors(llm, RAGGED[-1:])
        assert whole == pytest.approx(states(reference, RAGGED[-1])[-1].numpy(), abs=1e-4)
        (short,) = vectors(llm, RAGGED[-1:], dimensions=8)
        assert short == pytest.approx(whole[:8], abs=1e-5)
        with pytest.raises(RequestError, match="dimensions=9: the model allows 8, 16"):
            vectors(llm, dimensions=9)


@pytest.mark.parametrize("family", ["Gemma3Text", "GPT2", "Qwen3Moe"])
def test_families_embed_and_classify_under_transformers_names(family: str, tmp_path: Path) -> None:
    for head in ("Model", "ForSequenceClassification"):
        changes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "Moe" in family else {}
        reference = build(family, head, num_hidden_layers=2, num_labels=3, **changes)
        directory = tmp_path / head
        reference.save_pretrained(directory)
        with opened(directory) as llm:
            if head == "Model":
                expected = [normalize(states(reference, prompt)[-1], dim=0).numpy() for prompt in RAGGED[:4]]
                found = vectors(llm, RAGGED[:4])
            else:
                expected = [label_logits(reference, prompt) for prompt in RAGGED[:4]]
                found = [one.data for one in llm.classify(RAGGED[:4], use_activation=False)]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_a_classifier_gives_the_references_logits_and_probabilities(tmp_path: Path) -> None:
    """The labels agree if a prompt ends in padding, which transformers leaves out, in chunks and from the cache."""
    reference = build("Qwen3", "ForSequenceClassification", num_labels=3, id2label={0: "a", 1: "b", 2: "c"})
    reference.save_pretrained(tmp_path)
    prompts = [*RAGGED, [*RAGGED[3], PAD, PAD], [PAD, PAD]]
    expected = [label_logits(reference, prompt) for prompt in prompts]
    for config in (SMALL, TWO_RANKS):
        with opened(tmp_path, **config) as llm:
            for _ in range(2):
                raw = llm.classify(prompts, use_activation=False)
                for one, logits in zip(raw, expected, strict=True):
                    assert one.data == pytest.approx(logits, abs=1e-5)
            likely = llm.classify(prompts)
            for one, logits in zip(likely, expected, strict=True):
                assert one.data == pytest.approx(torch.tensor(logits).softmax(0).numpy(), abs=1e-5)
                assert one.label == "abc"[int(logits.argmax())]
            assert [one.data.tolist() for one in llm.encode(prompts)] == [one.data.tolist() for one in likely]


def test_rewards_of_a_head_with_two_products(tmp_path: Path) -> None:
    """The head is Qwen2.5-Math-RM's, in chunks and on two ranks; raw, for a reward has no bounds."""
    reward = save_reward_model(build("Qwen2", "Model"), tmp_path)
    expected = [reward(prompt) for prompt in RAGGED]
    assert max(expected) - min(expected) > 0.1
    for config in (SMALL, TWO_RANKS):
        with opened(tmp_path, **config) as llm:
            assert [one.data.item() for one in llm.classify(RAGGED)] == pytest.approx(expected, abs=1e-5)


def test_what_a_model_is_not_for_is_refused_and_says_what_works(tmp_path: Path) -> None:
    build("Llama", "ForSequenceClassification", num_labels=2).save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        for call, complaint in [
            (lambda: llm.generate([[5]]), "it generates no text"),
            (lambda: llm.embed([[5]]), "it gives no embeddings"),
            (lambda: llm.score("a", "b"), "it scores no pairs of texts"),
            (lambda: llm.generate([[5]], SamplingParams(pooling="mean")), "pooling='mean' is for others"),
        ]:
            with pytest.raises(RequestError, match=f"a classifier of 2 labels, and {complaint}; .*/classify.*/pooling"):
                call()
        # What a model without an LM head cannot do is left out, not met on the device.
        odd = SamplingParams(pooling="classify", logit_bias={9: 1.0}, logprobs=3, prompt_logprobs=2, max_tokens=7)
        assert llm.generate([[5]], odd)[0].usage.prompt_tokens == 1
    with LLM(progress=False) as llm:
        for call in (lambda: llm.classify([[5]]), lambda: llm.score("a", "b")):
            with pytest.raises(RequestError, match=r"a generating model, and .*LLM.generate, LLM.chat"):
                call()
        with pytest.raises(RequestError, match="pooling='classify' is for others"):
            llm.generate([[5]], SamplingParams(pooling="classify"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, Any]]:
    """(directory, model, tokenizer) of a language model that is untied."""
    directory = tmp_path_factory.mktemp("reranker")
    model = build("Qwen3", "ForCausalLM", vocab_size=3072)
    model.save_pretrained(directory)
    with_tokenizer(directory)
    return directory, model, AutoTokenizer.from_pretrained(directory)


def test_a_language_model_scores_pairs_by_two_tokens(reranker: tuple[Path, Any, Any], tmp_path: Path) -> None:
    directory, model, tokenizer = reranker
    (tmp_path / "pair.jinja").write_text(TEMPLATE)
    yes, no = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b"))
    settings = {"score_tokens": ["a", "b"], "score_template": str(tmp_path / "pair.jinja")}
    documents = ["def add(a, b):", "import numpy", "x = 1"]
    expected = []
    for document in documents:
        ids = tokenizer(f"Q: sum (True)\nD: {document}\nfits:", add_special_tokens=False).input_ids
        logits = label_logits(model, ids)[-1]
        expected.append(logits[yes] - logits[no])
    with opened(directory, "", model=settings) as llm:
        assert llm.score("sum", documents, use_activation=False) == pytest.approx(expected, abs=1e-4)
        chances = llm.score(["sum"] * 3, documents)
        assert chances == pytest.approx(torch.tensor(expected).sigmoid().tolist(), abs=1e-5)
        with pytest.raises(RequestError, match="2 texts to compare with 3"):
            llm.score(["a", "b"], documents)
        fits = len(tokenizer("Q: sum (True)\nD: def add\nfits:", add_special_tokens=False).input_ids)
        cut = llm.score("sum", ["def add" + " again" * 5000], truncate_prompt_tokens=fits)
        assert cut == pytest.approx(llm.score("sum", ["def add"]), abs=1e-6)
        with pytest.raises(RequestError, match="the query and the text around it have more tokens"):
            llm.score("sum", documents, truncate_prompt_tokens=3)


@pytest.mark.parametrize("variant", ["granite", "gemma2"])
def test_a_score_is_of_the_logits_that_the_model_gives(variant: str, tmp_path: Path) -> None:
    """Granite's are scaled, Gemma 2's are capped."""
    reference = checkpoints.build(variant)
    reference.save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "LogitScore", "path": "score"}]')
    (tmp_path / "score").mkdir()
    (tmp_path / "score" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 11}')
    with opened(tmp_path) as llm:
        found = [one.data[0] for one in llm.classify(RAGGED[:4], use_activation=False)]
    for one, prompt in zip(found, RAGGED, strict=False):
        logits = checkpoints.reference_logits(reference, prompt)[-1]
        assert one == pytest.approx(float(logits[7] - logits[11]), abs=1e-4)


def test_the_template_of_qwen3_reranker_is_the_published_format() -> None:
    template = read_template(Path(__file__).parents[3] / "examples" / "qwen3_reranker.jinja")
    text = template.render(pair("Where?", "There."))
    assert text.endswith(
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: Where?\n"
        "<Document>: There.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert knows_pairs(template)


def test_texts_are_joined_cut_and_named_as_the_tokenizer_does(reranker: tuple[Path, Any, Any], tmp_path: Path) -> None:
    _, _, tokenizer = reranker
    reference = build("Qwen3", "ForSequenceClassification", num_labels=1, vocab_size=3072, pad_token_id=None)
    reference.save_pretrained(tmp_path / "pairs")
    with_tokenizer(tmp_path / "pairs")
    with opened(tmp_path / "pairs", "") as llm:
        ids = tokenizer("sum", "def add(a, b):").input_ids
        expected = torch.tensor(label_logits(reference, ids)).sigmoid().tolist()
        assert llm.score("sum", "def add(a, b):") == pytest.approx(expected, abs=1e-5)
    embedder = build("Qwen3", "Model", vocab_size=3072)
    embedder.save_pretrained(tmp_path / "texts")
    with_tokenizer(tmp_path / "texts")
    write_modules(tmp_path / "texts", "lasttoken", normalize=True, prompts={"query": "Query: "})
    text = "def add(a, b):\n    return a + b\n"
    with opened(tmp_path / "texts", "") as llm:

        def reference_vector(text: str, **fields: Any) -> np.ndarray:
            ids = tokenizer(text, **fields).input_ids
            assert ids[-1] == 0, "the tokenizer ends a text with <|endoftext|>"
            return normalize(states(embedder, ids)[-1], dim=0).numpy()

        (named,) = vectors(llm, [text], prompt_name="query")
        assert named == pytest.approx(reference_vector("Query: " + text), abs=1e-5)
        (cut,) = vectors(llm, [text], truncate_prompt_tokens=5)
        assert cut == pytest.approx(reference_vector(text, truncation=True, max_length=5), abs=1e-5)
        (huge,) = llm.embed([text * 2000], truncate_prompt_tokens=-1)
        assert huge.usage.prompt_tokens == llm.max_model_len == 512
        ids = RAGGED[-1] * 5 + RAGGED[-1][:62]
        (whole,) = vectors(llm, [ids])
        assert whole == pytest.approx(normalize(states(embedder, ids)[-1], dim=0).numpy(), abs=1e-5)
        (similar,) = llm.score(text, "import")
        assert similar == pytest.approx(float(reference_vector(text) @ reference_vector("import")), abs=1e-5)
        with pytest.raises(RequestError, match="prompt_name='other': must be one of 'query'"):
            llm.embed([text], prompt_name="other")
        with pytest.raises(RequestError, match="truncate_prompt_tokens=0: must be -1, or from 1"):
            llm.embed([text], truncate_prompt_tokens=0)
        with pytest.raises(RequestError) as refused:
            llm.embed([list(range(600))])
        assert refused.value.code == "context_length_exceeded"
