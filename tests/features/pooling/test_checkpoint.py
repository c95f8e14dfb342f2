"""The use of a checkpoint's model: by its architecture, and by the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.checkpoints.checkpoint import ModelSpec, read_spec
from engine.checkpoints.shape import ClassifierShape, NoHeadShape, TokenScoreShape
from engine.features.pooling.checkpoint import Pooling, causal_names
from engine.plugins.families import read_model
from engine.plugins.features import checkpoint_features
from engine.settings.sections import ModelSection
from engine.types.errors import WeightsError

DEMO = Path(__file__).parents[3] / "examples" / "demo_model"


def write(directory: Path, architecture: str = "Qwen3ForCausalLM", files: dict[str, Any] | None = None, **more: Any):
    config = json.loads((DEMO / "config.json").read_text()) | {"architectures": [architecture], **more}
    for name, content in {"config.json": config, **(files or {})}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]


def read(directory: Path, **model: Any) -> ModelSpec:
    return read_model(directory, None, ModelSection(**model))


def embedding(directory: Path, mode: dict[str, Any], *kinds: str, **more: Any) -> Pooling:
    files = {"modules.json": modules("Transformer", "Pooling", *kinds), "1_Pooling/config.json": mode}
    return Pooling.of(read(write(directory, files=files, **more)).use)


def test_a_causal_model_generates(tmp_path: Path) -> None:
    spec = read(write(tmp_path))
    assert Pooling.of(spec.use) == Pooling()
    assert spec.shape.task_head is None
    assert spec.shape.num_outputs == spec.vocab_size


def test_names_of_architectures_say_what_head_there_is() -> None:
    assert causal_names("Qwen3ForCausalLM") == causal_names("GPT2LMHeadModel") == ()
    assert causal_names("GPT2Model") == ("GPT2ForCausalLM", "GPT2LMHeadModel")
    assert causal_names("Gemma3TextForSequenceClassification")[0] == "Gemma3ForCausalLM"


@pytest.mark.parametrize(
    "mode, method",
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_modules_say_how_to_pool(mode: dict[str, Any], method: str, tmp_path: Path) -> None:
    pooling = embedding(tmp_path, mode, "Normalize")
    assert (pooling.kind, pooling.method, pooling.normalized) == ("embed", method, True)


def test_an_embedding_is_at_length_one_only_if_a_module_says_so(tmp_path: Path) -> None:
    assert not embedding(tmp_path, {"pooling_mode": "mean"}).normalized


def test_a_model_without_a_head_embeds(tmp_path: Path) -> None:
    spec = read(write(tmp_path, "Qwen3Model"))
    assert Pooling.of(spec.use) == Pooling(kind="embed")
    assert isinstance(spec.shape.task_head, NoHeadShape)
    assert spec.shape.num_outputs == 1


def test_prompts_lengths_and_dimensions_are_read(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("Transformer"),
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "Query: ", "document": ""},
            "default_prompt_name": "query",
        },
    }
    spec = read(write(tmp_path, files=files, matryoshka_dimensions=[32, 64]))
    assert spec.max_len == 512
    assert Pooling.of(spec.use).prompts == {"query": "Query: ", "document": ""}
    assert (Pooling.of(spec.use).default_prompt, Pooling.of(spec.use).dimensions) == ("query", (32, 64))


@pytest.mark.parametrize(
    "more, labels, activation",
    [
        ({"id2label": {"1": "good", "0": "bad"}}, ("bad", "good"), "softmax"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "softmax"),
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "identity",
        ),
    ],
)
def test_a_classifier_has_labels(
    more: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    spec = read(write(tmp_path, "Qwen3ForSequenceClassification", **more))
    assert (Pooling.of(spec.use).labels, Pooling.of(spec.use).activation, spec.use.pad_token_id) == (
        labels,
        activation,
        0,
    )
    assert spec.shape.task_head == ClassifierShape(num_labels=len(labels))
    assert ("score" in spec.use.tasks) == (len(labels) == 1)


def test_tokens_make_a_reranker_of_a_language_model(tmp_path: Path) -> None:
    spec = read(write(tmp_path), tokenizer=str(DEMO), score_tokens=("a", "b"))
    files = {"modules.json": modules("Transformer", "LogitScore")}
    head = spec.shape.task_head
    assert isinstance(head, TokenScoreShape)
    assert head.name == "model.embed_tokens", "the LM head is tied"
    yes, no = head.token_ids
    files["1_LogitScore/config.json"] = {"true_token_id": yes, "false_token_id": no}
    assert read(write(tmp_path, files=files)).shape.task_head == head
    files["1_LogitScore/config.json"]["false_token_id"] = None
    assert Pooling.of(read(write(tmp_path, files=files)).use).score_ids == (yes,)
    with pytest.raises(WeightsError, match=r"tokenizer.json: has no token 'no such token'"):
        read(tmp_path, tokenizer=str(DEMO), score_tokens=("a", "no such token"))


@pytest.mark.parametrize(
    "files, message",
    [
        ({"modules.json": {}}, "modules.json: not a list of modules"),
        ({"modules.json": modules("Transformer", "Dense")}, "the module 'Dense' is not known; known are Transformer"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../up"}]}, "leads out of the checkpoint"),
        ({"modules.json": modules("Transformer", "Pooling")}, r"1_Pooling/config.json: no such file"),
        (
            {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": {"pooling_mode": "max"}},
            r'pooling_mode is \["max"\], expected one of lasttoken, mean',
        ),
        (
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
            },
            "include_prompt is false, expected true",
        ),
        (
            {
                "modules.json": modules("Transformer"),
                "config_sentence_transformers.json": {"default_prompt_name": "q", "prompts": {"query": ""}},
            },
            'default_prompt_name is "q", expected one of query',
        ),
        (
            {"modules.json": modules("Transformer", "LogitScore"), "1_LogitScore/config.json": {"false_token_id": 7}},
            "1_LogitScore/config.json: true_token_id is missing",
        ),
        (
            {
                "modules.json": modules("Transformer", "LogitScore"),
                "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 99999},
            },
            "a score is read from the logit of token 99999, but the model's last is 3071",
        ),
    ],
)
def test_what_cannot_be_done_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        read(write(tmp_path, files=files))


def test_labels_must_have_every_number(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"id2label .* expected a name for each number from 0 to 1"):
        read(write(tmp_path, "LlamaForSequenceClassification", model_type="llama", id2label={"0": "a", "2": "b"}))


def test_an_unknown_model_under_another_head_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='architectures is "BertForSequenceClassification", expected one of'):
        read(write(tmp_path, "BertForSequenceClassification"))


def test_a_family_may_have_a_head_of_its_own(tmp_path: Path) -> None:
    head = ClassifierShape(num_labels=1, name="reward_head")
    shape = msgspec.structs.replace(read(write(tmp_path, num_labels=1)).shape, task_head=head)
    spec = read_spec(tmp_path, lambda architecture, fields: shape, features=checkpoint_features())
    assert spec.shape.task_head == head
    assert (spec.use.kind, Pooling.of(spec.use).labels) == ("classify", ("LABEL_0",))
