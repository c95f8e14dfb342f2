"""The endpoints whose answers are no text, as vLLM's, OpenAI's, Jina's and Cohere's clients call them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.models.pooled import build, with_tokenizer, write_modules
from tests.server.engine_server import EngineServer
from tests.server.http_client import Reply, ask

QUERY, DOCUMENTS = "add two numbers", ["def add(a, b):", "import numpy", "return a + b"]
INFINITY = "/infinity"
CONVERSATION = [{"role": "user", "content": "Add two numbers."}]


def served(directory: Path, head: str, **changes: Any) -> EngineServer:
    build("Qwen3", head, vocab_size=3072, num_hidden_layers=1, **changes).save_pretrained(directory)
    with_tokenizer(directory)
    if head == "Model":
        write_modules(directory, "lasttoken", normalize=True, prompts={"query": "Query: "})
    return EngineServer(model={"path": str(directory), "name": "m"}, kv={"num_pages": 200})


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with served(tmp_path_factory.mktemp("embedder"), "Model") as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with served(tmp_path_factory.mktemp("reranker"), "ForSequenceClassification", num_labels=1) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    names = {0: "bad", 1: "good"}
    with served(tmp_path_factory.mktemp("classifier"), "ForSequenceClassification", id2label=names) as server:
        yield server


def post(server: EngineServer, path: str, **body: Any) -> Any:
    reply = ask(server.port, "POST", path, body)
    assert reply.status == 200, reply.body
    return reply.json


def refused(server: EngineServer, path: str, **body: Any) -> dict[str, Any]:
    reply: Reply = ask(server.port, "POST", path, body)
    assert reply.status == 400, reply.body
    error: dict[str, Any] = reply.json["error"]
    return error


def test_embeddings_come_as_openais_client_wants_them(embedder: EngineServer) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-", max_retries=0)
    many = [f"text {number}" for number in range(300)]  # more than are open at once
    answer = client.embeddings.create(model="m", input=many)
    vectors = np.array([entry.embedding for entry in answer.data])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert [entry.index for entry in answer.data] == list(range(300))
    (alone,) = client.embeddings.create(model="m", input=many[299], dimensions=8).data
    cut = vectors[299][:8]
    assert alone.embedding == pytest.approx(cut / np.linalg.norm(cut), abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 300
    with pytest.raises(openai.BadRequestError, match="2049 of them; at most 2048") as error:
        client.embeddings.create(model="m", input=["x"] * 2049)
    assert error.value.param == "input"


def test_inputs_of_every_kind_are_embedded(embedder: EngineServer) -> None:
    def vector(**body: Any) -> list[float]:
        (entry,) = post(embedder, "/v1/embeddings", **body)["data"]
        numbers: list[float] = entry["embedding"]
        return numbers

    plain = vector(input="Query: " + QUERY)
    assert vector(input=QUERY, prompt_name="query") == pytest.approx(plain, abs=1e-5)
    encoded = post(embedder, "/v1/embeddings", input=["Query: " + QUERY], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4") == pytest.approx(plain, abs=1e-5)
    ids = post(embedder, "/tokenize", prompt="Query: " + QUERY)["tokens"]
    assert vector(input=ids) == pytest.approx(plain, abs=1e-5)
    assert vector(input=ids, add_special_tokens=False) == pytest.approx(plain, abs=1e-5)
    assert vector(input=QUERY * 3, truncate_prompt_tokens=4) != pytest.approx(plain, abs=1e-3)
    assert post(embedder, "/pooling", input="Query: " + QUERY, task="embed")["data"][0]["data"] == pytest.approx(plain)
    raw = post(embedder, "/pooling", input="Query: " + QUERY, use_activation=False)["data"][0]["data"]
    assert np.array(raw) / np.linalg.norm(raw) == pytest.approx(plain, abs=1e-5)
    assert vector(input="Query: " + QUERY, normalize=False) == pytest.approx(raw, abs=1e-5)
    assert vector(input="Query: " + QUERY, add_special_tokens=True) == pytest.approx(plain, abs=1e-5)
    assert vector(input="") == pytest.approx(vector(input=[""]), abs=1e-6)
    error = refused(embedder, "/v1/embeddings", messages=CONVERSATION)
    assert error["code"] == "no_chat_template"


def test_a_vector_comes_for_each_token(embedder: EngineServer) -> None:
    ids = post(embedder, "/tokenize", prompt="Query: " + QUERY)["tokens"]
    answer = post(embedder, "/pooling", input=["Query: " + QUERY, "Query: x"], task="token_embed")
    vectors = np.array(answer["data"][0]["data"])
    assert (answer["object"], answer["data"][0]["object"], answer["data"][1]["index"]) == ("list", "pooling", 1)
    assert vectors.shape == (len(ids), 64)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    encoded = post(embedder, "/pooling", input=ids, task="token_embed", encoding_format="base64")["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4") == pytest.approx(vectors.ravel(), abs=1e-5)
    cut = np.array(post(embedder, "/pooling", input=ids, task="token_embed", dimensions=8)["data"][0]["data"])
    assert cut == pytest.approx(vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True), abs=1e-5)


def test_an_embedding_model_scores_by_the_cosine(embedder: EngineServer) -> None:
    every = post(embedder, "/v1/embeddings", input=[QUERY, *DOCUMENTS])["data"]
    query, *documents = (np.array(entry["embedding"]) for entry in every)
    scores = [entry["score"] for entry in post(embedder, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    assert scores == pytest.approx([float(query @ one) for one in documents], abs=1e-5)


def test_a_reranker_scores_and_ranks(reranker: EngineServer) -> None:
    answer = post(reranker, "/score", model="m", text_1=QUERY, text_2=DOCUMENTS)
    scores = [entry["score"] for entry in answer["data"]]
    assert all(0 < score < 1 for score in scores)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    for body in ({"queries": [QUERY] * 3, "documents": DOCUMENTS}, {"data_1": QUERY, "data_2": DOCUMENTS}):
        again = [entry["score"] for entry in post(reranker, "/v1/score", **body)["data"]]
        assert again == pytest.approx(scores, abs=1e-6)
    ranks = sorted(range(3), key=lambda index: -scores[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        best = [scores[index] for index in ranks[:2]]
        for most in ({"top_n": 2}, {"top_k": 2}):
            ranking = post(reranker, path, query=QUERY, documents=documents, **most)["results"]
            assert [one["index"] for one in ranking] == ranks[:2]
            assert [one["document"]["text"] for one in ranking] == [DOCUMENTS[index] for index in ranks[:2]]
            assert [one["relevance_score"] for one in ranking] == pytest.approx(best, abs=1e-6)
    bare = post(reranker, "/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)
    assert [sorted(one) for one in bare["results"]] == [["index", "relevance_score"]] * 3
    assert post(reranker, "/classify", input="x")["data"][0]["label"] == "LABEL_0"


def test_texts_are_ranked_as_other_servers_clients_have_them(reranker: EngineServer) -> None:
    scores = [one["score"] for one in post(reranker, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    ranks = sorted(range(3), key=lambda index: -scores[index])
    ranked = post(reranker, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert [sorted(one) for one in ranked] == [["index", "score"]] * 3
    assert [one["index"] for one in ranked] == ranks
    assert [one["score"] for one in ranked] == pytest.approx([scores[index] for index in ranks], abs=1e-6)
    raw = post(reranker, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True, truncate=True)
    assert [one["text"] for one in raw] == [DOCUMENTS[index] for index in ranks]
    logits = [one["score"] for one in raw]
    assert [1 / (1 + np.exp(-one)) for one in logits] == pytest.approx([scores[index] for index in ranks], abs=1e-5)
    passages = [{"text": text} for text in DOCUMENTS]
    ranking = post(reranker, "/v1/ranking", model="m", query={"text": QUERY}, passages=passages, truncate="END")
    assert [one["index"] for one in ranking["rankings"]] == ranks
    assert [one["logit"] for one in ranking["rankings"]] == pytest.approx(logits, abs=1e-6)
    assert refused(reranker, "/v1/ranking", query={"text": "x"}, passages=[])["param"] == "passages"
    assert refused(reranker, "/rerank", query="x", texts=[])["param"] == "texts"
    assert refused(reranker, "/rerank", query="x", texts=["x"], documents=["x"])["param"] == "documents"
    assert refused(reranker, "/rerank", query="x")["param"] == "documents"


def test_a_classifier_names_its_labels(classifier: EngineServer) -> None:
    answer = post(classifier, "/classify", input=DOCUMENTS)
    assert answer["object"] == "list"
    for index, one in enumerate(answer["data"]):
        assert (one["index"], one["num_classes"], sum(one["probs"])) == (index, 2, pytest.approx(1.0, abs=1e-6))
        assert one["label"] == ("bad", "good")[int(np.argmax(one["probs"]))]
    raw = post(classifier, "/v1/classify", input=DOCUMENTS, use_activation=False)["data"]
    for older in ("softmax", "activation"):
        again = post(classifier, "/v1/classify", input=DOCUMENTS, **{older: False})["data"]
        assert [one["probs"] for one in again] == [pytest.approx(one["probs"], abs=1e-5) for one in raw]
    powers = np.exp([one["probs"] for one in raw])
    likely = [one["probs"] for one in answer["data"]]
    assert powers / powers.sum(axis=1, keepdims=True) == pytest.approx(np.array(likely), abs=1e-5)
    pooled = post(classifier, "/pooling", input=DOCUMENTS, task="classify")["data"]
    assert np.array([one["data"] for one in pooled]) == pytest.approx(np.array(likely), abs=1e-6)


def rounded(answer: Any) -> Any:
    """An answer with numbers of four digits: a text alone and one of several are computed by other products."""
    if isinstance(answer, dict):
        return {name: rounded(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [*map(rounded, answer)]
    return round(answer, 4) if isinstance(answer, float) else answer


def test_labels_come_as_teis_and_sglangs_clients_ask_for_them(classifier: EngineServer) -> None:
    def found(path: str, **body: Any) -> Any:
        return rounded(post(classifier, path, **body))

    data = found("/classify", input=DOCUMENTS)["data"]
    assert found("/classify", text=DOCUMENTS)["data"] == data
    assert found("/classify", text=DOCUMENTS[0])["data"] == data[:1]
    assert refused(classifier, "/classify", text="a", input="a")["param"] == "text"
    assert refused(classifier, "/classify", text=[])["param"] == "text"
    each = found("/predict", inputs=DOCUMENTS)
    named = [dict(zip(("bad", "good"), one["probs"], strict=True)) for one in data]
    assert [{one["label"]: one["score"] for one in both} for both in each] == named
    assert all(first["score"] >= second["score"] for first, second in each)
    assert found("/predict", inputs=DOCUMENTS[0]) == found("/predict", inputs=[DOCUMENTS[0]]) == each[0]
    assert found("/predict", inputs=[[one] for one in DOCUMENTS]) == each
    together = found("/predict", inputs=DOCUMENTS[:2])
    assert {one["label"] for one in together} == {"bad", "good"}
    assert together not in each
    assert found("/predict", inputs=[DOCUMENTS[:2], [DOCUMENTS[2]]]) == [together, each[2]]
    raw = found("/predict", inputs=DOCUMENTS[0], raw_scores=True)
    assert sum(one["score"] for one in raw) != pytest.approx(1.0, abs=1e-3)
    long = "add two numbers " * 4000
    assert refused(classifier, "/predict", inputs=long)["param"] == "inputs"
    assert len(post(classifier, "/predict", inputs=long, truncate=True)) == 2
    for wrong in ([], [[]], [["a", "b", "c"]], 1, None):
        assert refused(classifier, "/predict", inputs=wrong)["param"].startswith("inputs"), wrong


def test_texts_come_as_jinas_and_sglangs_clients_send_them(embedder: EngineServer) -> None:
    data = rounded(post(embedder, "/v1/embeddings", input=DOCUMENTS)["data"])
    assert rounded(post(embedder, "/v1/embeddings", input=[{"text": one} for one in DOCUMENTS])["data"]) == data
    assert refused(embedder, "/v1/embeddings", input=[{"image": "a"}])["param"].startswith("input[0]")
    plain = [{"embedding": one["embedding"]} for one in data]
    assert rounded(post(embedder, "/encode", text=DOCUMENTS)) == plain
    assert rounded(post(embedder, "/encode", text=DOCUMENTS[0])) == plain[0]
    assert refused(embedder, "/encode", text=[])["param"] == "text"
    assert refused(embedder, "/predict", inputs="a")["code"] == "unsupported_task"


def test_models_say_what_they_are_for(embedder: EngineServer, classifier: EngineServer) -> None:
    for server, kind in ((embedder, "embed"), (classifier, "classify")):
        assert ask(server.port, "GET", "/v1/models").json["data"][0]["kind"] == kind
        assert ask(server.port, "GET", "/model_info").json["is_generation"] is False
        assert ask(server.port, "GET", "/health_generate").status == 200
    error = refused(classifier, "/v1/chat/completions", model="m", messages=CONVERSATION)
    assert error["code"] == "unsupported_task"
    assert error["message"].startswith("this is a classifier of 2 labels, and it generates no text; what works is")
    assert "/classify, /pooling" in error["message"]
    assert "it has no labels" in refused(embedder, "/classify", input="x")["message"]
    assert "it scores no pairs" in refused(classifier, "/v2/rerank", query="a", documents=["b"])["message"]
    assert "/v1/score, /v1/rerank" in refused(embedder, "/generate", text="x")["message"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "x", "messages": CONVERSATION}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "other"}, "prompt_name"),
        ("/v1/embeddings", {"input": [5], "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncation_side": "left"}, "truncation_side"),
        ("/v1/embeddings", {"input": [4000]}, "input"),
        ("/v1/embeddings", {"input": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/rerank", {"query": "x", "documents": ["x"], "add_special_tokens": False}, "add_special_tokens"),
        ("/pooling", {"input": "x", "task": "token_classify"}, "task"),
        ("/pooling", {"input": "x", "task": "token_embed", "pooling": "mean"}, "pooling"),
        ("/pooling", {"input": "x", "task": "token_embed", "dimensions": 65}, "dimensions"),
        ("/score", {"text_1": "x"}, "text_1"),
        ("/score", {"query": ["x"], "items": ["y"]}, "query[0]"),
        ("/score", {"query": "x", "items": ["y"], "label_token_ids": [1, 2]}, "label_token_ids"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"] * 3}, "text_2"),
        ("/score", {"queries": ["x", "y"], "items": []}, "items"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x", "documents": [{"image": "x"}]}, "documents[0].text"),
    ],
)
def test_a_wrong_value_names_its_field(path: str, body: dict[str, Any], param: str, embedder: EngineServer) -> None:
    assert refused(embedder, path, **body)["param"] == param


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(reranker: EngineServer) -> None:
    long = "word " * 1500
    error = refused(reranker, "/v1/score", text_1="x", text_2=long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "text_2")
    cut = post(reranker, "/v1/score", text_1="x", text_2=long, truncate_prompt_tokens=-1)
    # The last token is the pad token as well, which transformers leaves out.
    assert cut["usage"]["prompt_tokens"] == reranker.system.max_len - 1
    assert refused(reranker, "/rerank", query=long, documents=["x"], truncate_prompt_tokens=-1)["param"]


def test_odd_bodies_are_answered_or_refused(embedder: EngineServer, classifier: EngineServer) -> None:
    """No 500 and no silence, whatever the fields hold."""
    odd: list[Any] = ["", "x", [], [""], [[]], [1], [[1, 2], []], 5, None, True, {}, "\ud800", ["a", 1], -1, 1 << 70]
    names = ("input", "messages", "text_1", "text_2", "query", "documents", "top_n", "dimensions", "prompt_name")
    flags = ("truncate_prompt_tokens", "use_activation", "encoding_format", "task", "pooling", "priority")
    paths = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
    dice = np.random.default_rng(7)

    def one(values: Any) -> Any:
        return values[int(dice.integers(len(values)))]

    for number in range(150):
        body = {name: one(odd) for name in (one(names), one(names), one(names), one(flags))}
        server = one((embedder, classifier))
        reply = ask(server.port, "POST", one(paths), json.loads(json.dumps(body)))
        assert reply.status in (200, 400, 409), f"{number}: {body} -> {reply.status} {reply.body!r}"
    assert post(embedder, "/v1/embeddings", input="x")["data"]


def test_vectors_as_coheres_and_teis_clients_ask_for_them(embedder: EngineServer) -> None:
    def vectors(texts: list[str], **more: Any) -> list[list[float]]:
        data = post(embedder, "/v1/embeddings", model="m", input=texts, **more)["data"]
        return [entry["embedding"] for entry in data]

    plain, queries = vectors(DOCUMENTS), vectors(DOCUMENTS, prompt_name="query")
    body = {"model": "m", "texts": DOCUMENTS, "embedding_types": ["float", "base64"], "input_type": "search_query"}
    answer = post(embedder, "/v2/embed", **body)
    assert answer["embeddings"]["float"] == queries
    assert len(answer["embeddings"]["base64"]) == len(answer["texts"]) == 3
    assert answer["meta"]["billed_units"]["input_tokens"] > 3
    assert post(embedder, "/v2/embed", texts=DOCUMENTS, input_type="clustering")["embeddings"] == {"float": plain}
    assert post(embedder, "/embed", inputs=DOCUMENTS) == plain
    assert post(embedder, "/embed", inputs=DOCUMENTS[0], prompt_name="query") == queries[:1]
    long = "add two numbers " * 4000
    assert len(post(embedder, "/embed", inputs=long, truncate=True)[0]) == len(plain[0])
    assert refused(embedder, "/embed", inputs=long)["param"] == "inputs"
    raw = post(embedder, "/v2/embed", texts=DOCUMENTS, normalize=False)["embeddings"]["float"]
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1.0)
    assert refused(embedder, "/v2/embed", texts=[long], truncate="NONE")["param"] == "texts"
    assert refused(embedder, "/v2/embed", texts=["a"], input_type="image")["param"] == "input_type"


def test_infinitys_clients_find_vectors_in_any_size_under_a_path_of_their_own(embedder: EngineServer) -> None:
    asked = {"input": DOCUMENTS, "model": "default/not-specified", "modality": "text", "encoding_format": "float"}
    theirs = post(embedder, f"{INFINITY}/embeddings", **asked, dimensions=0)
    ours = post(embedder, "/v1/embeddings", input=DOCUMENTS)
    assert (theirs["object"], theirs["model"], theirs["usage"]) == ("list", "m", ours["usage"])
    for one, other in zip(theirs["data"], ours["data"], strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    cut = post(embedder, f"{INFINITY}/embeddings", input=QUERY, output_dimension=8)["data"][0]["embedding"]
    small = post(embedder, "/v1/embeddings", input=QUERY, dimensions=8)["data"][0]["embedding"]
    assert cut == pytest.approx(small, abs=1e-5)
    assert refused(embedder, f"{INFINITY}/embeddings", input="x", modality="image")["param"] == "modality"


def test_infinitys_clients_get_documents_as_texts_and_only_if_they_ask(reranker: EngineServer) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS, "model": "m"}
    ours = post(reranker, "/v1/rerank", **asked)
    theirs = post(reranker, f"{INFINITY}/rerank", **asked, return_documents=True, top_n=2)
    assert theirs["object"] == "rerank"
    assert theirs["usage"] == ours["usage"]
    for one, other in zip(theirs["results"], ours["results"][:2], strict=True):
        assert (one["index"], one["document"]) == (other["index"], other["document"]["text"])
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=1e-5)
    plain = post(reranker, f"{INFINITY}/rerank", **asked, raw_scores=True)["results"]
    assert "document" not in plain[0]
    raw = post(reranker, "/v1/rerank", **asked, use_activation=False)["results"]
    scores = [[one["relevance_score"] for one in found] for found in (plain, raw)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert refused(reranker, f"{INFINITY}/rerank", query=QUERY, texts=DOCUMENTS)["param"] == "texts"


@pytest.mark.parametrize("raw", [False, True])
def test_infinitys_clients_get_every_label_of_each_text(classifier: EngineServer, raw: bool) -> None:
    theirs = post(classifier, f"{INFINITY}/classify", input=DOCUMENTS, model="default/not-specified", raw_scores=raw)
    assert theirs["object"] == "classify"
    assert theirs["usage"]["prompt_tokens"] > 0
    ours = post(classifier, "/predict", inputs=[[one] for one in DOCUMENTS], raw_scores=raw)
    for one, other in zip(theirs["data"], ours, strict=True):
        assert [label["label"] for label in one] == [label["label"] for label in other]
        assert [label["score"] for label in one] == pytest.approx([label["score"] for label in other], abs=1e-5)


def test_a_query_and_items_are_a_pair_to_a_model_that_scores_them(reranker: EngineServer) -> None:
    pairs = post(reranker, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    theirs = post(reranker, "/v1/score", query=QUERY, items=DOCUMENTS)["data"]
    assert [one["score"] for one in theirs] == pytest.approx([one["score"] for one in pairs], abs=1e-5)
    error = refused(reranker, "/v1/score", query=QUERY, items=DOCUMENTS, label_token_ids=[1, 2])
    assert error["param"] == "label_token_ids"
    assert "this is a reranking" in error["message"]
    assert refused(reranker, "/v1/score", query=[1], items=[[2]])["param"] == "query"
